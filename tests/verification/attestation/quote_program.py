"""A program for `--attestation command`: signs 64 bytes by a test's own root, for a SEV-SNP guest.

`python -m tests.verification.attestation.quote_program FOLDER HEX`, where `MadeRoot.save` wrote.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

from tests.verification.attestation.made_quotes import MadeRoot, snp_quote


def main(folder: str, report_data: str) -> None:
    quote = snp_quote(bytes.fromhex(report_data), root=MadeRoot.load(Path(folder)))
    report, *certificates = (
        base64.b64encode(each).decode() for each in (quote.report, *quote.certificates)
    )
    print(json.dumps([{"kind": "snp", "report": report, "certificates": certificates}]))


if __name__ == "__main__":
    main(*sys.argv[1:])
