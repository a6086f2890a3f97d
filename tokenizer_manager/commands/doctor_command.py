"""`millstream doctor`: can this machine serve? Every finding is ok, warn or fail, with what mends it."""

import argparse

import msgspec

from .doctor_checks import Subject, Verdict, check_all


def main(argv: list[str]) -> int:
    """Print the findings; 1 if any fails, 2 for a bad command line."""
    options = _parse(argv)
    findings = check_all(Subject(model=options.model, host=options.host, port=options.port))
    if options.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=2).decode())
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            print(f"{finding.verdict.value:<4}  {finding.name:<{width}}  {finding.text}")
            if finding.fix:
                print(f"{'':<4}  {'':<{width}}  -> {finding.fix}")
    return int(any(finding.verdict is Verdict.FAIL for finding in findings))


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="millstream doctor",
        allow_abbrev=False,
        description="Check whether this machine can serve, and say what to mend.",
    )
    parser.add_argument("model", nargs="?", default="smollm2", metavar="MODEL", help="also look for this model")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="port to listen on (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="a JSON list, for machines")
    return parser.parse_args(argv)
