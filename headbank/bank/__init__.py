"""The head bank: which heads of one model vote, and how they were found.

A bank is the folder `ROOT/<model-slug>/`:

* `manifest.json`: the model's fingerprint, the head sets, fusions and defaults, the record of the calibration,
  and the size and SHA-256 of every other file; its own SHA-256 is taken over all its other fields.
* `maps.safetensors`: score maps named `<detector>.<view>.<layout>.<quantity>`, shaped [L, H] or [P, L, H].

No time stamps: equal banks are equal bytes.
"""

from headbank.bank.compare import FINGERPRINT_FIELDS, Difference, check, diff
from headbank.bank.files import MANIFEST, MAPS, find, locate, read, shipped_root, slug, write
from headbank.bank.schema import READ_VERSIONS, SCHEMA_VERSION, Bank, Manifest, validate

__all__ = [
    "FINGERPRINT_FIELDS",
    "MANIFEST",
    "MAPS",
    "READ_VERSIONS",
    "SCHEMA_VERSION",
    "Bank",
    "Difference",
    "Manifest",
    "check",
    "diff",
    "find",
    "locate",
    "read",
    "shipped_root",
    "slug",
    "validate",
    "write",
]
