"""Engines take a round's tasks and return the clients' updates in the tasks' order."""
