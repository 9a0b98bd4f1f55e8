"""This host's share of a run, as older tools' launchers say it: the options of `launch local` and `launch manual`.

Read next: `posttraining/posttraining_launch.py`, `ript/ript_launch.py`, `vla/vla_launch.py`, the launchers.
"""

from openpi_train.launch.spec import LaunchError


def this_host(
    *,
    processes: int,
    num_hosts: int,
    host: int,
    master_addr: str | None,
    master_port: int | None,
    default_port: int,
    addr_option: str,
    devices_per_process: int | None,
    log_dir: str | None,
    dry_run: bool,
) -> list[str]:
    """The arguments of `launch` that start this host's processes, without those after `--`.

    Raises LaunchError if several hosts have no address of the first, which the tool calls `addr_option`.
    """
    if num_hosts == 1:
        words: list[object] = ["local", "--processes", processes]
        words += ["--port", master_port] if master_port else []
    else:
        if master_addr is None:
            raise LaunchError(f"{num_hosts} hosts need {addr_option}, the address of the first")
        words = ["manual", "--node-rank", host, "--num-nodes", num_hosts, "--processes-per-node", processes]
        words += ["--master-addr", master_addr, "--master-port", master_port or default_port]
    words += ["--devices-per-process", devices_per_process] if devices_per_process else []
    words += ["--log-dir", log_dir] if log_dir else []
    return [*map(str, words), *(["--dry-run"] if dry_run else [])]
