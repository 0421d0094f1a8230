"""The work without any framework: one model, one process, a running mean of the clients' results.

Run: python benchmarks/peers/bare_side.py FOLDER OUT.json --rounds R
"""

import torch
from workload import Laps, Workload, arguments, report, train_client


def main() -> None:
    options = arguments().parse_args()
    work = Workload(options.folder)
    net = work.model()
    parameters = dict(net.named_parameters())
    state = {name: tensor.clone() for name, tensor in work.initial.items()}
    work.train, work.plan  # noqa: B018  (read before the clock starts)
    laps = Laps()
    for round_ in range(1, options.rounds + 1):
        mean = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        cohort = work.cohort(round_)
        for client in cohort:
            net.load_state_dict(state)
            train_client(net, work, round_, client)
            with torch.no_grad():
                for name, parameter in parameters.items():
                    mean[name].add_(parameter, alpha=1 / len(cohort))
        state = mean
        laps.lap()
    report(
        options.out, work, state, laps, packages=(), processes=1, threads=torch.get_num_threads()
    )


if __name__ == "__main__":
    main()
