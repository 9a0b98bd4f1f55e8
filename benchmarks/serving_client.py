"""Several of openpi's own clients send requests to a server as fast as it answers; prints a JSON line.

It runs in a separate environment (`openpi_peer.py`) and imports nothing of this project. Arguments: the port, an API
key or "", clients, requests of each.
"""

import concurrent.futures
import json
import sys
import time

import numpy as np
from openpi_client.websocket_client_policy import WebsocketClientPolicy  # pyright: ignore[reportMissingImports]


def main(port: int, key: str, num_clients: int, num_requests: int) -> None:
    """Send the requests; print the answers, the time of each request, and the time from the first to the last."""
    policies = [WebsocketClientPolicy(host="127.0.0.1", port=port, api_key=key) for _ in range(num_clients)]
    metadata = policies[0].get_server_metadata()

    def request(seed: int) -> dict:
        random = np.random.default_rng(seed)

        def made(spec: dict):
            if spec["dtype"] == "str":
                return "pick up the red cube"
            return (100 * random.random(spec["shape"])).astype(spec["dtype"])

        return {name: made(spec) for name, spec in metadata["observation"].items()}

    def talk(number: int) -> list[dict]:
        done = []
        for step in range(num_requests):
            asked = request(1000 * number + step)
            started = time.perf_counter()
            answer = policies[number].infer(asked)
            done.append({**_told(answer), "ms": 1e3 * (time.perf_counter() - started)})
        return done

    policies[0].infer(request(0))
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        answers = [answer for some in pool.map(talk, range(num_clients)) for answer in some]
    seconds, error = time.perf_counter() - started, ""
    try:
        policies[0].infer({"prompt": "no state, no image"})
    except RuntimeError as raised:
        error = str(raised)
    again = _told(policies[0].infer(request(0)))
    said = {"metadata": metadata, "answers": answers, "seconds": seconds, "error": error, "again": again}
    print(json.dumps({**said, "numpy": np.__version__}))


def _told(answer: dict) -> dict:
    actions = answer["actions"]
    return {
        "draw": answer["draw"],
        "dtype": actions.dtype.str,
        "shape": list(actions.shape),
        "sum": float(actions.sum()),
        "rows": answer["server_timing"]["batch_rows"],
        "device_ms": answer["policy_timing"]["infer_ms"],
    }


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
