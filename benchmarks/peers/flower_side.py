"""The work by Flower's simulation engine: FedAvg, message API, Ray backend.

Run: .envs/flower/bin/python benchmarks/peers/flower_side.py FOLDER OUT.json --rounds R
"""

import logging
import os

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import flower_app
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from workload import CLIENTS, Workload, arguments, report


def main() -> None:
    parser = arguments()
    parser.add_argument("--cpus", type=int, default=os.cpu_count(), help="for all of Ray")
    parser.add_argument("--cpus-per-client", type=int, default=1, help="threads of an actor")
    options = parser.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    work = Workload(options.folder)
    strategy = flower_app.PlannedFedAvg(work)
    server = ServerApp()
    final = {}

    @server.main()
    def federate(grid: Grid, context: Context) -> None:
        del context
        config = ConfigRecord(
            {"folder": str(options.folder.resolve()), "threads": options.cpus_per_client}
        )
        strategy.meet(grid, config, CLIENTS)
        result = strategy.start(
            grid, ArrayRecord(work.initial), num_rounds=options.rounds, train_config=config
        )
        final.update(result.arrays.to_torch_state_dict())

    run_simulation(
        server,
        flower_app.client,
        num_supernodes=CLIENTS,
        backend_config={
            "init_args": {"num_cpus": options.cpus, "log_to_driver": False},
            "client_resources": {"num_cpus": options.cpus_per_client, "num_gpus": 0.0},
        },
    )
    report(
        options.out, work, final, strategy.laps,
        packages=("flwr", "ray"),
        processes=options.cpus // options.cpus_per_client,
        threads=options.cpus_per_client,
    )  # fmt: skip


if __name__ == "__main__":
    main()
