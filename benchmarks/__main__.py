"""`make bench`: everything that is promised as a figure, in one run.

    python -m benchmarks [--quick] [--out bench-results/latest.json]

Prints tables for people and writes JSON with the machine named. How to read it: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import chats, decision, index, long_prompts, prefix, radix_peer, relay, request, scoring, scrape
from gateway.runtime.interpreter import is_compiled, tune_interpreter

TRACES = Path(__file__).parent.parent / "tests" / "golden" / "traces"


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "compiled": is_compiled(),
        "kernel": platform.release(),
        "load": os.getloadavg()[0],
        "at": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
    }


def main() -> int:
    """Run the chosen parts; the exit code: 0, 1 when a part could not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Figures of kvgate beside nginx.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: an idea in a minute instead of five")
    parser.add_argument(
        "--only",
        action="append",
        choices=(
            "relay",
            "request",
            "approximate",
            "chats",
            "prefix",
            "index",
            "lookup",
            "decision",
            "scoring",
            "scrape",
            "long_prompts",
        ),
    )
    parser.add_argument(
        "--dynamo-python",
        type=Path,
        help="Python of an environment with ai-dynamo-runtime: its radix tree beside our index; with ai-dynamo: its "
        "frontend in `chats`",
    )
    parser.add_argument("--smg-python", type=Path, help="Python of an environment with smg: beside ours in `chats`")
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with trace files")
    parser.add_argument("--out", type=Path, default=Path("bench-results/latest.json"))
    args = parser.parse_args()
    rounds = 2 if args.quick else 5
    available = tuple(name for name, case in scoring.CASES.items() if (args.traces / case.file).exists())
    peer = cache(lambda: radix_peer.ask(args.dynamo_python))  # one run of it for both parts that show it
    peers = chats.Peers(smg=args.smg_python, dynamo=args.dynamo_python)
    parts: dict[str, Callable[[], Mapping[str, object]]] = {
        "relay": lambda: asdict(relay.measure(rounds=rounds)),
        "request": lambda: request.measure(rounds=rounds),
        "approximate": lambda: request.measure(rounds=rounds, approximate=True),
        "chats": lambda: {mode: chats.measure(mode, rounds=rounds, peers=peers) for mode in chats.MODES},
        "prefix": prefix.measure,
        "index": lambda: index.run(peer=peer()),
        "lookup": lambda: index.lookups(peer=peer()),
        "decision": lambda: decision.measure_decisions(rounds=500 if args.quick else 2000),
        "scrape": scrape.measure,
        "long_prompts": lambda: {mode: long_prompts.measure(mode, rounds=rounds) for mode in long_prompts.MODES},
        "scoring": lambda: scoring.measure_scoring(args.traces, names=available[:1] if args.quick else available),
    }
    results: dict[str, object] = {"machine": machine()}
    _say(f"machine: {results['machine']}")
    failed = False
    for name, run in parts.items():
        if args.only and name not in args.only:
            continue
        _say(f"\n## {name}")
        if name == "decision":
            tune_interpreter()  # as `kvgate serve` does
        try:
            figures = run()
        except RuntimeError as error:
            _say(f"not measured: {error}")
            failed = True
            continue
        results[name] = figures
        _say(_table(figures))
        if name == "lookup":
            _say(_beside(peer()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    _say(f"\nwritten to {args.out}")
    return 1 if failed else 0


def _beside(peer: Mapping[str, Any] | None) -> str:
    if peer is not None:
        return f"beside: the radix tree of ai-dynamo-runtime {peer['version']}"
    return (
        f"ai-dynamo-runtime: not installed; `{radix_peer.HOW_TO_INSTALL}`, then --dynamo-python /tmp/dynamo/bin/python"
    )


def _table(figures: Mapping[str, object]) -> str:
    """Rows of a flat mapping, or a table of a mapping of mappings with one row each."""
    nested = {name: row for name, row in figures.items() if isinstance(row, dict)}
    if not nested:
        width = max(len(name) for name in figures)
        return "\n".join(f"{name:<{width}}  {_number(value):>12}" for name, value in figures.items())
    columns = list(next(iter(nested.values())))
    lines = ["| | " + " | ".join(columns) + " |", "|---|" + "---|" * len(columns)]
    lines += [f"| {name} | " + " | ".join(_number(row[c]) for c in columns) + " |" for name, row in nested.items()]
    return "\n".join(lines)


def _number(value: object) -> str:
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
