"""A subspace codec whose frozen embedding changes during a run: a payload is read in the version
that it names, or refused with that name."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflock.compression.activation import ActivationContext, Incompatible
from farflock.compression.codec import CorruptPayload, UnencodableTensor
from farflock.compression.subspace import Basis, Subspace
from farflock.compression.subspace_versions import SubspaceVersions, Superseded

WIDTH, RANK, VOCABULARY = 16, 4, 30
CHANCE = torch.Generator().manual_seed(1)
TOKENS = torch.randint(0, VOCABULARY, (2, 5), generator=CHANCE)
COLUMNS = Basis.drawn(WIDTH, RANK, 2).columns_DK
NO_POSITIONS = torch.empty(0, WIDTH)
BASES = {
    version: Basis(version, COLUMNS, torch.randn(VOCABULARY, WIDTH, generator=CHANCE), NO_POSITIONS)
    for version in range(1, 7)
}
INSIDE = torch.randn(2, 5, RANK, generator=CHANCE) @ COLUMNS.T
GRADIENT = torch.randn(2, 5, WIDTH, generator=CHANCE)


def codec(*versions):
    made = SubspaceVersions(Subspace(BASES[1], None, None))
    for version in versions:
        made.hold(BASES[version])
    return made


def context(direction="forward", version=None):
    return ActivationContext((2, 5, WIDTH), tokens=TOKENS, direction=direction, version=version)


def activation(version):
    """An activation made with the weights of this version."""
    return BASES[version].fixed_VD[TOKENS] + INSIDE


def sent(made, x, version=None):
    out = bytearray()
    made.encode(x, context(version=version), out)
    return bytes(out)


def test_what_is_encoded_in_a_version_is_read_in_it_whatever_the_reader_speaks_itself():
    sender, receiver = codec(2, 3), codec(2, 3)
    receiver.speak(3)
    for version in (1, 2, 3):
        payload = sent(sender, activation(version), version)
        assert payload == sent(
            SubspaceVersions(Subspace(BASES[version], None, None)), activation(version)
        )
        assert receiver.version_of(payload) == version
        torch.testing.assert_close(
            receiver.decode(payload, context()), activation(version), rtol=0, atol=1e-5
        )


def test_without_a_version_in_its_context_an_activation_goes_in_the_spoken_one():
    made = codec(2, 3)
    assert made.version_of(sent(made, activation(1))) == 1
    made.speak(2)
    assert made.version_of(sent(made, activation(2))) == 2
    assert (made.version, made.digest) == (2, BASES[2].digest)
    assert [offer.version for offer in made.offers(0)] == [2, 1, 3]
    assert made.name == "subspace:4+raw,raw"
    with pytest.raises(UnencodableTensor, match="outside the subspace"):
        sent(made, activation(1))


def test_gradients_go_back_in_the_version_that_the_activation_came_in():
    made, out = codec(2), bytearray()
    made.encode_grad(GRADIENT, context("backward", version=2), out)
    assert made.version_of(out) == 2
    expected = GRADIENT @ COLUMNS @ COLUMNS.T
    torch.testing.assert_close(
        made.decode_grad(out, context("backward")), expected, rtol=0, atol=1e-5
    )
    assert made.max_bytes(context("backward")) == len(out)


def test_what_is_not_here_yet_is_refused_otherwise_than_what_is_over():
    made = codec(2, 4, 5)
    made.speak(5)
    made.give_up(4)
    assert sorted(made.held) == [4, 5]
    for read, direction in ((made.decode, "forward"), (made.decode_grad, "backward")):
        for version in (1, 2, 3):
            with pytest.raises(Superseded, match=f"version {version} .* is over; held are 4, 5"):
                read(payload_of(version), context(direction))
        with pytest.raises(
            Incompatible, match=r"version 6 .* is not here yet; held are 4, 5"
        ) as refused:
            read(payload_of(6), context(direction))
        assert not isinstance(refused.value, Superseded)


def payload_of(version):
    return sent(SubspaceVersions(Subspace(BASES[version], None, None)), activation(version))


def test_another_table_of_the_same_version_is_never_decoded():
    made, other = codec(2), dataclasses.replace(BASES[2], fixed_VD=BASES[2].fixed_VD + 1e-3)
    liar = SubspaceVersions(Subspace(other, None, None))
    payload = sent(liar, other.fixed_VD[TOKENS] + INSIDE)
    with pytest.raises(Incompatible, match="came with basis 2"):
        made.decode(payload, context())


def test_the_spoken_version_is_kept_as_long_as_it_is_spoken_and_a_held_one_stays_as_it_is():
    made = codec(2, 3)
    made.give_up(3)
    assert sorted(made.held) == [1, 2, 3], "its own payloads' answers must be read"
    made.hold(dataclasses.replace(BASES[3], fixed_VD=BASES[4].fixed_VD))
    assert torch.equal(made.held[3].fixed_VD, BASES[3].fixed_VD)
    made.speak(3)
    made.give_up(3)
    assert sorted(made.held) == [3]
    with pytest.raises(ValueError, match=r"version 1 .* is not held; there are \[3\]"):
        made.speak(1)


def test_a_version_of_another_size_is_not_held():
    for other in (
        BASES[2].with_tables(torch.zeros(VOCABULARY + 1, WIDTH)),
        Basis.drawn(WIDTH, RANK + 1, 1, 2),
    ):
        with pytest.raises(ValueError, match="another size"):
            codec().hold(other)


@given(st.binary(max_size=400))
def test_any_bytes_are_refused_or_decode_to_finite_values(payload):
    made = codec(2)
    for read, direction in ((made.decode, "forward"), (made.decode_grad, "backward")):
        try:
            assert bool(read(payload, context(direction)).isfinite().all())
        except (CorruptPayload, Incompatible):
            continue
