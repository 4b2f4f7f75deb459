"""Ciphertexts in the hands of Microsoft SEAL, by its serialized forms (SEAL 4, native/src/seal)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from nesa_node.privacy.encrypted_product import encode_matrix, multiply
from nesa_node.privacy.layout import plan_layout
from nesa_node.privacy.native_ring import make_ring
from nesa_node.privacy.parameters import INPUT_SCALE, RingParameters
from nesa_node.privacy.ring import Residues
from nesa_node.privacy.secret_key import SecretKey
from nesa_node.privacy.slots import coefficients_of
from tests.privacy.keys import expanded_keys

seal: Any = pytest.importorskip("seal")

RING = make_ring(RingParameters())
DEGREE = RING.degree


@pytest.fixture(scope="module")
def context() -> Any:
    """SEAL's, which finds its primes itself, and checks that they are secure."""
    parameters = seal.EncryptionParameters(seal.scheme_type.ckks)
    parameters.set_poly_modulus_degree(DEGREE)
    bits = list(RING.parameters.prime_bits)
    parameters.set_coeff_modulus(seal.CoeffModulus.Create(DEGREE, bits))
    return seal.SEALContext(parameters, True, seal.sec_level_type.tc128)


@pytest.fixture(scope="module")
def order(context: Any) -> list[int]:
    """Our index of each of SEAL's primes."""
    primes = [each.value() for each in context.key_context_data().parms().coeff_modulus()]
    assert sorted(primes) == sorted(RING.primes)
    assert primes[-1] == RING.primes[-1]
    return [RING.primes.index(each) for each in primes]


def replace_tail(whole: bytes, residues: Residues) -> bytes:
    """A serialized object with other numbers of 64 bits, which are its last."""
    data = residues.astype("<u8").tobytes()
    return whole[: len(whole) - len(data)] + data


def decryptor(context: Any, key: SecretKey, order: list[int], folder: Path) -> Any:
    """SEAL's, with our secret key."""
    theirs = seal.KeyGenerator(context).secret_key()
    path = folder / "secret"
    theirs.save(str(path))
    path.write_bytes(replace_tail(path.read_bytes(), key._secret_PN[order]))
    theirs.load(context, str(path))
    return seal.Decryptor(context, theirs)


def seal_decrypts(
    context: Any, decrypt: Any, ciphertext: Residues, order: list[int]
) -> npt.NDArray[np.uint64]:
    """Values [P - 1, N] of the message, which SEAL holds modulo its primes."""
    generator = seal.KeyGenerator(context)
    encoded = seal.CKKSEncoder(context).encode(0.5, INPUT_SCALE)
    template = seal.Encryptor(context, generator.secret_key()).encrypt_symmetric(encoded)
    whole = replace_tail(template.to_string(seal.compr_mode_type.none), ciphertext[:, order[:-1]])
    given = seal.Ciphertext()
    given.load_bytes(context, whole)
    plain = decrypt.decrypt(given)
    data = plain.to_bytes(seal.compr_mode_type.none)
    return np.frombuffer(data[-8 * 3 * DEGREE :], "<u8").reshape(3, DEGREE)


def test_seal_decrypts_ciphertexts_to_the_same_integers(
    context: Any, order: list[int], tmp_path: Path
) -> None:
    key = SecretKey(RING)
    rng = np.random.default_rng(0)
    slots = rng.uniform(-0.7, 0.7, 2048) + 1j * rng.uniform(-0.7, 0.7, 2048)
    ciphertext = key.encrypt(slots).expand(RING)
    decrypt = decryptor(context, key, order, tmp_path)
    found = seal_decrypts(context, decrypt, ciphertext, order)
    ours = RING.add(ciphertext[0], RING.multiply(ciphertext[1], key._secret_PN[:3]))
    assert np.array_equal(found, ours[order[:3]])
    # The message that was encrypted, but for errors of six standard deviations at most.
    values = np.empty_like(ours)
    values[order[:3]] = found
    message = RING.coefficients(values)[0].astype(np.int64)
    errors = (message - coefficients_of(slots, INPUT_SCALE)) % RING.primes[0]
    errors = np.where(errors > RING.primes[0] // 2, errors - RING.primes[0], errors)
    assert 2.5 < errors.std() < 4
    assert np.abs(errors).max() < 20


def test_seal_decrypts_a_product(context: Any, order: list[int], tmp_path: Path) -> None:
    """Before it is rescaled, SEAL reads from it what numpy computes."""
    key = SecretKey(RING)
    rng = np.random.default_rng(1)
    weight, x = rng.normal(size=(32, 64)), rng.uniform(-1, 1, 64)
    layout = plan_layout(32, 64, RING.parameters.slots)
    matrix = encode_matrix(RING, layout, weight)
    keys = expanded_keys(key, RING, [layout])
    chunks = [key.encrypt(each).expand(RING) for each in layout.pack(x)]
    (result,) = multiply(RING, matrix, chunks, keys)
    # It has two primes, and SEAL's first level three: times the third, it is the same message.
    third = RING.primes[2]
    factors = np.array([[third % prime] for prime in RING.primes[:2]], np.uint32)
    raised = np.zeros((2, 3, DEGREE), np.uint32)
    raised[:, :2] = RING.multiply(RING.values(result), factors)
    values = np.empty((3, DEGREE), np.uint32)
    decrypt = decryptor(context, key, order, tmp_path)
    values[order[:3]] = seal_decrypts(context, decrypt, raised, order)
    assert not values[2].any()
    inverses = np.array([[pow(third, -1, prime)] for prime in RING.primes[:2]], np.uint32)
    message = RING.coefficients(RING.multiply(values[:2], inverses))
    plain = key.decrypt(np.stack([message, np.zeros_like(message)]), matrix.scale)
    y = layout.unpack([plain])
    assert np.abs(y - weight @ x).max() < 1e-5 * np.abs(weight @ x).max()
