"""Models of transformers' own classes with the interface of `Llama`, for full replicas.

Losses are cross-entropies of next tokens. What some classes add to theirs on request, such as the
balance of a router, is no part of them. Steps must repeat and must not see what they predict:
`HfModel.require_causal` asks the model itself, since no configuration says so.

Shapes: B sequences, L positions, D model width, V vocabulary.
"""

import hashlib
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflock.node.model import loss
from farflock.node.model.hf_config import BadModelFolder
from farflock.node.model.hf_shape import (
    OTHER_MODEL,
    HfShape,
    Theirs,
    guarded,
    made_by_transformers,
    transformers_module,
)
from farflock.node.model.llama import Llama, LossReduction, ModelConfig, cross_entropy

_PROBED = 8  # tokens


class HfModel(nn.Module):
    """A causal language model of transformers with the interface of `Llama`, and with the names
    that tensors have in transformers; a tied one has one name.

    Its weights are those that its class draws, in the order in which it does, from a generator of
    their own that `seed` keys. It is made on torch's default device."""

    _inner: Theirs

    def __init__(self, config: HfShape, seed: int = 0) -> None:
        super().__init__()
        inner = _seeded(config.hf, seed)
        # One set of tensors, so that `to`, `state_dict` and functional calls reach them by name.
        for part in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[part] = inner.__dict__[part]
        self.__dict__["_inner"] = inner
        self.config = config
        self.logits_at_once: int | None = None  # None: loss.MAX_LOGITS
        self.chunk_loss: loss.ChunkLoss = loss.in_place
        self._is_plain: bool | None = None
        self._is_checkpointing = False
        takes = inspect.signature(inner.forward).parameters
        self._keeps = "past_key_values" in takes and not inner._is_stateful
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    @property
    def checkpointing(self) -> bool:
        """True if backward passes compute each layer again. A class of which transformers cannot do
        that keeps all activations in any case."""
        return self._is_checkpointing

    @checkpointing.setter
    def checkpointing(self, chosen: bool) -> None:
        inner, was = self._inner, self._is_checkpointing
        self._is_checkpointing = chosen and bool(inner.supports_gradient_checkpointing)
        # Versions of transformers before 5.23 have the other name only.
        name = "activation" if hasattr(inner, "activation_checkpointing_enable") else "gradient"
        if self._is_checkpointing:
            options = {"use_reentrant": False, "preserve_rng_state": False}
            getattr(inner, f"{name}_checkpointing_enable")(options)
        elif was:
            getattr(inner, f"{name}_checkpointing_disable")()

    def train(self, mode: bool = True) -> "HfModel":
        """Set the mode of transformers' model too; only `checkpointing` depends on it."""
        self.training = mode
        self._inner.train(mode)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "HfModel":
        """Tie again what moves: to some devices torch moves the names of a tensor one by one."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.config.facts.aliases:
            self._inner.tie_weights()
        return self

    def blocks(self) -> list[nn.Module]:
        """Return the layers in order, or none if they are not found: torch.compile takes each."""
        lists = (x for x in self._inner.modules() if isinstance(x, nn.ModuleList))
        return next((list(x) for x in lists if len(x) == self.config.layers), [])

    def empty_cache(self) -> "HfCache":
        """Return a cache for `forward` that has seen no token."""
        return HfCache(self._inner.config if self._keeps else None)

    def forward(
        self,
        x_BL: Tensor,
        targets_BL: Tensor | None = None,
        reduction: LossReduction = "mean",
        cache: "HfCache | None" = None,
    ) -> Tensor:
        """Return logits (B, L, V) of tokens (B, L). With targets, return their cross-entropy in
        nats instead, as their mean or sum, or without gradients as that of each token (B, L); of a
        large vocabulary's logits only a chunk exists at a time, if the class computes them from its
        last states with one matrix alone. Targets `loss.IGNORED` are left out; the mean of none is
        0.

        With a cache, the tokens follow those of its earlier calls, and only the logits of the last
        one (B, 1, V) are returned."""
        stop = x_BL.shape[1] + (0 if cache is None else cache.length)
        if stop > self.config.context:
            raise ValueError(
                f"a sequence of {stop} tokens is longer than the model's context "
                f"{self.config.context}; shorten it"
            )
        if cache is not None:
            return self._continued(x_BL, cache)
        if targets_BL is None:
            return self._logits(x_BL)
        tokens = loss.chunk_tokens(self.config.vocab_size, self.logits_at_once)
        if targets_BL.numel() <= tokens or not self._computes_plainly(x_BL):
            return cross_entropy(self._logits(x_BL), targets_BL, reduction)
        return self._chunked(self._states(x_BL), targets_BL, reduction, tokens)

    def _chunked(
        self, x_BLD: Tensor, targets_BL: Tensor, reduction: LossReduction, tokens: int
    ) -> Tensor:
        weight = self._inner.get_output_embeddings().weight
        flat = x_BLD.flatten(0, 1), weight, targets_BL.flatten(), tokens
        if reduction == "none":
            return loss.token_losses(*flat).view(targets_BL.shape)
        total = loss.summed_loss(*flat, self.chunk_loss)
        return loss.mean_of(total, targets_BL) if reduction == "mean" else total

    def require_causal(self) -> None:
        """Raise `BadModelFolder` if these weights' logits depend on later tokens, or on random
        numbers, or are not finite; this computes a few short passes."""
        length, vocabulary = min(_PROBED, self.config.context), self.config.vocab_size
        x_BL = (torch.arange(length, device=self._place)[None] * 7 + 1) % vocabulary
        other_BL = x_BL.clone()
        other_BL[0, -1] = (other_BL[0, -1] + 1) % vocabulary
        given = [(x_BL, False), (other_BL, False), (x_BL, True), (x_BL, True)]
        found = guarded(lambda: self._probed(given), "the model")
        if not all(bool(one.isfinite().all()) for one in found):
            raise BadModelFolder(f"the model's logits are not finite; {OTHER_MODEL}")
        if not _close(found[0][:, :-1], found[1][:, :-1]):
            raise BadModelFolder(
                f"a model of class {type(self._inner).__name__} sees the tokens that it is to "
                f"predict; {OTHER_MODEL}, one that generates text"
            )
        if not all(_close(found[0], one) for one in found[2:]):
            raise BadModelFolder(
                f"a model of class {type(self._inner).__name__} draws random numbers while it is "
                f"trained, and steps must repeat; {OTHER_MODEL}"
            )

    @torch.no_grad()
    def _probed(self, given: list[tuple[Tensor, bool]]) -> list[Tensor]:
        was, found = self.training, []
        with torch.random.fork_rng(devices=[]):
            for number, (x_BL, in_training) in enumerate(given):
                torch.default_generator.manual_seed(number)
                self.train(in_training)
                found.append(self._logits(x_BL))
        self.train(was)
        return found

    @property
    def _place(self) -> torch.device:
        return next(self.parameters()).device

    def _logits(self, x_BL: Tensor) -> Tensor:
        logits: Tensor = self._inner(input_ids=x_BL).logits
        return logits

    def _states(self, x_BL: Tensor) -> Tensor:
        states: Tensor = self._inner.base_model(input_ids=x_BL)[0]
        return states

    @torch.no_grad()
    def _computes_plainly(self, x_BL: Tensor) -> bool:
        """Return whether logits are the product of the last states and the head's weights, and
        nothing else, such as a scale or a cap: the model itself is asked, once."""
        if self._is_plain is None:
            head = self._inner.get_output_embeddings()
            some_BL = x_BL[:1, :_PROBED]
            self._is_plain = False
            if isinstance(head, nn.Linear) and head.bias is None:
                logits, states = self._logits(some_BL), self._states(some_BL)
                fits = states.shape[-1:] == head.weight.shape[1:]
                product = F.linear(states, head.weight) if fits else None
                # a product of zeros would hide a factor
                self._is_plain = product is not None and bool(product.any())
                self._is_plain &= product is not None and torch.equal(product, logits)
        return self._is_plain

    def _continued(self, x_BL: Tensor, cache: "HfCache") -> Tensor:
        given = cache.extended(x_BL)
        if cache.kept is None:
            return self._logits(given)[:, -1:]
        found = self._inner(
            input_ids=given, past_key_values=cache.kept, use_cache=True, **self._last_only
        )
        logits: Tensor = found.logits[:, -1:]
        return logits


class HfCache:
    """The keys and values that a model of transformers has computed of a text, so that a further
    token costs one position. Of a class without them (`config` is None) it remembers the tokens,
    which are then computed again each time."""

    def __init__(self, config: Theirs | None) -> None:
        self.length = 0
        self.kept = None if config is None else transformers_module().DynamicCache(config=config)
        self._ids: list[Tensor] = []

    def extended(self, x_BL: Tensor) -> Tensor:
        """Count new tokens; return those that have to be computed."""
        self.length += x_BL.shape[1]
        if self.kept is not None:
            return x_BL
        self._ids.append(x_BL)
        return torch.cat(self._ids, dim=1)


AnyModel = Llama | HfModel


def model_of_shape(config: ModelConfig, span: range | None = None) -> AnyModel:
    """Return a model of this shape, or a stage of a native one, whose weights mean nothing."""
    return HfModel(config) if isinstance(config, HfShape) else Llama(config, span)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= 1e-4 * one.abs().max()) if one.numel() else True


def _seeded(text: str, seed: int) -> Theirs:
    """Return transformers' model, drawn on the CPU unless it has no memory, on torch's default
    device; the global generator is as it was."""
    place = torch.get_default_device()
    digest = hashlib.sha256(f"farflock-hf-init-v1 {seed}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` would seed the generators of devices too.
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        with torch.device("meta" if place.type == "meta" else "cpu"):
            model = made_by_transformers(text)
    return model.to(place)
