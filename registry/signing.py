"""Load keys, and make and verify cosign's image signatures and DSSE envelopes with in-toto statements.

Keys are ECDSA keys on the curve P-256 in PEM files, as cosign uses them. An encrypted key's password comes from
``PITORCH_SIGNING_PASSWORD`` or a prompt. This password is handled like the registry's password: it is never passed as
an argument, never logged, and removed from the environment before any program is started.
"""

from __future__ import annotations

import base64
import binascii
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
from securesystemslib.dsse import Envelope
from securesystemslib.exceptions import UnverifiedSignatureError, VerificationError
from securesystemslib.signer import CryptoSigner, Signature, SSlibKey

from registry import passwords
from toolchain.errors import SignatureRefused, UserError

PASSWORD_VARIABLE = passwords.SIGNING
STATEMENT_TYPE = "application/vnd.in-toto+json"
_KIND = "an ECDSA key on the curve P-256 in a PEM file"
_MAKE = "run openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -aes-256-cbc -out signing.pem"
_KEY_ID = ""
"""The key id is empty, because cosign ignores an empty key id but would look up any other one among its own keys."""


@dataclass(frozen=True)
class PublicKey:
    """A public key that verifies signatures, and the path of its file."""

    key: SSlibKey
    path: Path


def load_private(path: Path) -> CryptoSigner:
    """Load a private key; prompt for its password if the environment has none. Raises UserError."""
    content = _read(path, "registry.signing_key")
    try:
        try:
            key = load_pem_private_key(content, None)
        except TypeError:  # the key is encrypted
            key = load_pem_private_key(content, _password(path).encode(errors="surrogateescape"))
    except (ValueError, TypeError, UnsupportedAlgorithm):
        # The library's message is omitted, because it may quote the input.
        raise UserError(
            f"{path} cannot be used to sign",
            expected=f"{_KIND}, and its password",
            found="another kind of file, or a wrong password",
            fix=f"{_MAKE}, then set registry.signing_key to the path of the new file",
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _other_kind(path)
    return CryptoSigner(key, _public(key.public_key()))


def load_public(path: Path) -> PublicKey:
    """Load a public key. Raises UserError."""
    content = _read(path, "--key")
    try:
        key = load_pem_public_key(content)
    except (ValueError, UnsupportedAlgorithm):
        raise UserError(
            f"{path} is not a public key",
            expected=_KIND,
            found="another kind of file",
            fix="run openssl pkey -in signing.pem -pubout -out signing.pub",
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _other_kind(path)
    return PublicKey(_public(key), path)


def _read(path: Path, setting: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as fault:
        raise UserError(
            f"the key {path} cannot be read", expected=_KIND, found=str(fault.strerror), fix=f"correct {setting}"
        ) from fault


def _other_kind(path: Path) -> UserError:
    return UserError(
        f"{path} contains a key of an unsupported kind", expected=_KIND, found="another algorithm or curve", fix=_MAKE
    )


def _password(path: Path) -> str:
    if password := passwords.take(PASSWORD_VARIABLE):
        return password
    if not (sys.stdin is not None and sys.stdin.isatty()):
        raise UserError(
            f"the key {path} is encrypted",
            expected=f"the key's password in {PASSWORD_VARIABLE}, or a terminal for a prompt",
            found="neither",
            fix=f"set {PASSWORD_VARIABLE} to the key's password",
        )
    return passwords.prompt(f"Password of {path}: ")


def _public(key: ec.EllipticCurvePublicKey) -> SSlibKey:
    made = SSlibKey.from_crypto(key)
    return SSlibKey(_KEY_ID, made.keytype, made.scheme, made.keyval)


def envelope(statement: Mapping[str, Any], signer: CryptoSigner) -> bytes:
    """Return a DSSE envelope with a signed statement."""
    made = Envelope(json.dumps(statement, sort_keys=True).encode(), STATEMENT_TYPE, {})
    made.sign(signer)
    return json.dumps(made.to_dict(), sort_keys=True).encode()


def open_envelope(content: bytes, key: PublicKey, what: str, *, fix: str) -> dict[str, Any]:
    """Verify an envelope and return its statement.

    Raises SignatureRefused. If the content is invalid, the error contains ``fix`` as advice for the user.
    """
    try:
        found = Envelope.from_dict(json.loads(content))
        found.verify([key.key], 1)
        statement = json.loads(found.payload)
        if found.payload_type != STATEMENT_TYPE or not isinstance(statement, dict):
            raise ValueError(f"the payload is not an in-toto statement; its type is {found.payload_type}")
    except VerificationError:
        raise wrong_key(what, key) from None
    except (ValueError, KeyError, TypeError, AttributeError) as fault:
        raise SignatureRefused(
            f"{what} is not a signed statement",
            expected="a DSSE envelope with an in-toto statement",
            found=f"{type(fault).__name__}: {fault}",
            fix=fix,
        ) from fault
    return statement


def sign(content: bytes, signer: CryptoSigner) -> str:
    """Sign bytes as cosign does, and return the signature in base64."""
    return base64.b64encode(bytes.fromhex(signer.sign(content).signature)).decode()


def require_signed(content: bytes, signature: str, key: PublicKey, what: str) -> None:
    """Raise SignatureRefused unless the key verifies cosign's signature of the given bytes."""
    try:
        raw = base64.b64decode(signature, validate=True).hex()
        key.key.verify_signature(Signature(_KEY_ID, raw), content)
    except (UnverifiedSignatureError, binascii.Error, ValueError):
        raise wrong_key(what, key) from None


def wrong_key(what: str, key: PublicKey) -> SignatureRefused:
    """Return the error for a signature that does not verify with this key."""
    return SignatureRefused(
        f"{what} was not signed with this key, or was changed afterwards",
        expected=f"a signature that is valid for the key in {key.path}",
        found="a signature that does not verify with this key",
        fix="pass the signer's public key with --key; if this is the signer's key, do not use the image",
    )
