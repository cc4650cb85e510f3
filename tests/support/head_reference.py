"""What a draft head must propose: the whole text in, without a cache, logits of candidates out, in float64.

Written from the papers' and engines' descriptions of each head alone; it shares nothing with the package. Positions
count from the first token of a row, without pads. x_0 .. x_n is the text so far, of which the target has read all but
x_n; candidates are x_{n+1} and on.
"""

import math
from collections.abc import Sequence

import torch
from head_files import EPS, GROUPS, HEAD_DIM, HEADS, TinyHead
from torch import Tensor, nn


def round_logits(
    head: TinyHead, embeddings: Tensor, output: Tensor, tokens: Sequence[int], states: Sequence[Tensor], drafted
) -> list[Tensor]:
    """[V] the logits of each candidate of a round, those before it known; -inf at tokens that the head does not know.

    Args:
        head: with the fields of its paper.
        embeddings, output: [V, H] the target's own, for heads without.
        tokens: [n + 1] the text so far.
        states: for each of the head's layer ids [n, H]; for Medusa one alone, behind the final norm.
        drafted: [K] the candidates of the round; the last one has no influence.
    """
    weights = _doubles(head)
    embeddings = weights.get("embed_tokens.weight", embeddings.double())
    output = weights.get("lm_head.weight", output.double())
    states = [state.double() for state in states]
    proposed = PROPOSALS[head.kind](head, weights, embeddings, output, list(tokens), states, list(drafted))
    if "d2t" not in weights:
        return proposed
    ids = torch.arange(len(weights["d2t"])) + weights["d2t"]
    nothing = torch.full((head.vocab,), -torch.inf, dtype=torch.float64)
    return [nothing.index_copy(0, ids, logits) for logits in proposed]


def head_logits(head: TinyHead, embeddings: Tensor, output: Tensor, tokens, states, drafted=()) -> Tensor:
    """[V] the logits of the candidate behind those that are `drafted`."""
    return round_logits(head, embeddings, output, tokens, states, [*drafted, 0])[-1]


def confidences(head: TinyHead, embeddings: Tensor, tokens, states, drafted) -> Tensor:
    """[K] of DSpark: how sure the head is of each candidate, of which it has seen those before."""
    weights = _doubles(head)
    embeddings = weights.get("embed_tokens.weight", embeddings.double())
    slots = _block(head, weights, embeddings, list(tokens), [state.double() for state in states])
    before = weights["markov_head.markov_w1.weight"][torch.tensor([tokens[-1], *drafted[:-1]])]
    features = torch.cat([slots[: len(drafted)], before], -1)
    return torch.sigmoid(features @ weights["confidence_head.proj.weight"][0] + weights["confidence_head.proj.bias"])


def _doubles(head: TinyHead) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in head.weights.items()}


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def _rotate(x: Tensor, positions: Tensor, head: TinyHead) -> Tensor:
    """x is [heads, m, HEAD_DIM]: the first channels are turned, in pairs of one from each half of them.

    With `in_pairs` in pairs of neighbours.
    """
    turned = head.turning or int(HEAD_DIM * (head.rotary_factor if head.scaling else 1))
    speed = head.theta ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
    speed, grown = _scaled(speed, head.theta, head.scaling or {"rope_type": "default"})
    angle = positions.double()[:, None] * speed
    cos, sin, rest = grown * angle.cos(), grown * angle.sin(), x[..., turned:]
    if head.in_pairs:
        pairs = x[..., :turned].unflatten(-1, (-1, 2))
        first, second = pairs[..., 0], pairs[..., 1]
        both = torch.stack([first * cos - second * sin, second * cos + first * sin], -1).flatten(-2)
        return torch.cat([both, rest], -1)
    first, second = x[..., : turned // 2], x[..., turned // 2 : turned]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


SCALES = {"mscale": 1, "mscale_all_dim": 0}  # of yarn, and what they are where they are not said


def _scaled(speed: Tensor, theta: float, scaling: dict) -> tuple[Tensor, float]:
    """The speeds of channels by which positions are scaled, and what cosines and sines grow by."""
    kind, factor = scaling["rope_type"], scaling.get("factor", 1.0)
    if kind in ("default", "linear"):
        return speed / factor, 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        turns = original * speed / (2 * math.pi)  # of a channel over the texts that it was trained on first
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * speed + (1 - kept) * speed / factor, 1.0
    assert kind == "yarn"
    size = 2 * len(speed)
    fast, slow = (
        size * math.log(original / (2 * math.pi * turns)) / (2 * math.log(theta))
        for turns in (scaling.get("beta_fast", 32), scaling.get("beta_slow", 1))
    )
    first, last = max(math.floor(fast), 0), min(math.ceil(slow), size - 1)
    kept = 1 - ((torch.arange(len(speed), dtype=torch.float64) - first) / (last - first)).clamp(0, 1)
    above, below = (1 + 0.1 * scaling.get(name, usual) * math.log(factor) for name, usual in SCALES.items())
    return kept * speed + (1 - kept) * speed / factor, above / below


def _project(weights: dict, name: str, x: Tensor) -> Tensor:
    return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)


def _heads(weights: dict, layer: str, part: str, x: Tensor, positions: Tensor, head: TinyHead) -> Tensor:
    """[heads, m, HEAD_DIM] the queries, keys or values of a layer."""
    count = HEADS if part == "q" else GROUPS
    y = _project(weights, f"{layer}self_attn.{part}_proj", x).view(-1, count, HEAD_DIM).transpose(0, 1)
    norm = weights.get(f"{layer}self_attn.{part}_norm.weight")
    y = y if norm is None else _rms(y, norm)
    return y if part == "v" else _rotate(y, positions, head)


def _attend(weights: dict, layer: str, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """`seen` [queries, keys]."""
    k, v = (each.repeat_interleave(HEADS // GROUPS, 0) for each in (k, v))
    scores = (q @ k.transpose(1, 2) / HEAD_DIM**0.5).masked_fill(~seen, -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(q.shape[1], -1)
    return _project(weights, f"{layer}self_attn.o_proj", mixed)


def _mlp(weights: dict, layer: str, x: Tensor) -> Tensor:
    gate = nn.functional.silu(_project(weights, f"{layer}mlp.gate_proj", x))
    return _project(weights, f"{layer}mlp.down_proj", gate * _project(weights, f"{layer}mlp.up_proj", x))


def _fuse(weights: dict, joined: Tensor) -> Tensor:
    """What EAGLE-3 makes of the joined states [m, n_aux * H]."""
    if "fc_norm.0.weight" in weights:
        parts = joined.split(len(weights["fc_norm.0.weight"]), -1)
        joined = torch.cat([_rms(part, weights[f"fc_norm.{index}.weight"]) for index, part in enumerate(parts)], -1)
    if "input_norm.weight" in weights:
        joined = _rms(joined, weights["input_norm.weight"])
    return _project(weights, "fc", joined)


def _eagle_layers(head: TinyHead, weights: dict, embedded: Tensor, states: Tensor) -> Tensor:
    """[m, H] the states behind the last layer; entry i stands at position i and sees those up to itself."""
    positions = torch.arange(len(embedded))
    causal = positions[:, None] >= positions
    first = _rms(embedded, weights["layers.0.input_layernorm.weight"])
    normed = _rms(states, weights["layers.0.hidden_norm.weight"])
    x, read = normed if head.norm_before_residual else states, torch.cat([first, normed], -1)
    for number in range(head.layers):
        layer = f"layers.{number}."
        read = _rms(x, weights[f"{layer}input_layernorm.weight"]) if number else read
        q, k, v = (_heads(weights, layer, part, read, positions, head) for part in "qkv")
        seen = causal
        if head.layer_types and head.layer_types[number] == "sliding_attention":
            seen = causal & (positions[:, None] - positions < head.window)
        x = x + _attend(weights, layer, q, k, v, seen)
        x = x + _mlp(weights, layer, _rms(x, weights[f"{layer}post_attention_layernorm.weight"]))
    return x


def _eagle3(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """Entry i pairs the state of position i with the token at i + 1; candidates go on with the head's own states."""
    fused = _fuse(weights, torch.cat(states, -1))
    text, proposed = [*tokens[1:], *drafted], []
    for _ in drafted:
        embedded = embeddings[torch.tensor(text[: len(fused)])]
        behind = _eagle_layers(head, weights, embedded, fused)
        normed = _rms(behind, weights["norm.weight"])
        proposed.append((normed if head.last_norm else behind)[-1] @ output.T)
        fused = torch.cat([fused, (normed if head.norm_output else behind)[-1:]])
    return proposed


def _peagle(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """All candidates at once: behind the true entries stand masks, which do not know what was drafted."""
    number = len(drafted) - 1
    masks = weights["mask_hidden"][0].expand(number, -1)
    fused = _fuse(weights, torch.cat([torch.cat(states, -1), masks]))
    embedded = embeddings[torch.tensor([*tokens[1:], *[head.mask_token] * number])]
    if "mask_embedding" in weights:
        embedded = torch.cat([embedded[: len(tokens) - 1], weights["mask_embedding"].expand(number, -1)])
    behind = _eagle_layers(head, weights, embedded, fused)
    return list(_rms(behind[-number - 1 :], weights["norm.weight"]) @ output.T)


def _block(head: TinyHead, weights: dict, embeddings: Tensor, tokens: list[int], states: list[Tensor]) -> Tensor:
    """[block, H] the normed states of a block: the newest token, and masks behind it."""
    context = _rms(_project(weights, "fc", torch.cat(states, -1)), weights["hidden_norm.weight"])
    n = len(context)
    x = embeddings[torch.tensor([tokens[-1], *[head.mask_token] * (head.block - 1)])]
    if "mask_embedding" in weights:
        x = torch.stack([x[0], *[weights["mask_embedding"]] * (head.block - 1)])
    x = x * head.embedding_scale
    before, here = torch.arange(n), torch.arange(n, n + head.block)
    keys = torch.cat([before, here])
    for number in range(head.layers):
        layer = f"layers.{number}."
        normed = _rms(x, weights[f"{layer}input_layernorm.weight"])
        u = _convolved(weights, f"{layer}attention_conv.", normed, normed, 0)
        q = _heads(weights, layer, "q", u, here, head)
        k, v = (
            torch.cat(
                [_heads(weights, layer, part, context, before, head), _heads(weights, layer, part, u, here, head)], 1
            )
            for part in "kv"
        )
        seen = torch.ones(head.block, n + head.block, dtype=torch.bool)
        if head.layer_types and head.layer_types[number] == "sliding_attention":
            seen = (here[:, None] - keys < head.window) | (keys >= n)
            if not head.window_non_causal:
                seen &= keys <= here[:, None]
        if head.causal:
            seen = seen & (keys <= here[:, None])
        x = x + _convolved(weights, f"{layer}attention_conv.", normed, _attend(weights, layer, q, k, v, seen), 1)
        normed = _rms(x, weights[f"{layer}post_attention_layernorm.weight"])
        y = _mlp(weights, layer, _convolved(weights, f"{layer}mlp_conv.", normed, normed, 0))
        x = x + _convolved(weights, f"{layer}mlp_conv.", normed, y, 1)
    return _rms(x, weights["norm.weight"])


def _convolved(weights: dict, name: str, read: Tensor, x: Tensor, side: int) -> Tensor:
    """[block, H] of DFlash2: each slot is a sum over itself and those before, with weights that what is read tells.

    `side` 0 is before a part of a layer, 1 behind it. Heads without convolutions have x itself.
    """
    if f"{name}base_kernel" not in weights:
        return x
    base, projection = weights[f"{name}base_kernel"], weights[f"{name}kernel_projection.weight"]
    taps, width = base.shape[1:]
    groups = len(projection) // (2 * taps)
    dynamic = (read @ projection.T).view(len(x), 2, taps, groups)[:, side].repeat_interleave(width // groups, -1)
    kernels = base[side] + dynamic  # of each slot and tap
    y = torch.zeros_like(x)
    for tap in range(taps):  # the first slots have no others before them
        y[tap:] += kernels[tap:, tap] * x[: len(x) - tap]
    return y


def _proposing(head, weights, embeddings, tokens, states, drafted) -> Tensor:
    """[K, H] the slots that propose: each the token of its own position, or, from the anchor, the one behind it."""
    return _block(head, weights, embeddings, tokens, states)[0 if head.from_anchor else 1 :][: len(drafted)]


def _dflash(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    return list(_proposing(head, weights, embeddings, tokens, states, drafted) @ output.T)


def _dspark(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """A block, and on top what each token says of the next one."""
    slots = _proposing(head, weights, embeddings, tokens, states, drafted)
    rank = weights["markov_head.markov_w1.weight"].shape[1]
    memory, proposed = torch.zeros(rank, dtype=torch.float64), []
    for z, before in zip(slots, [tokens[-1], *drafted], strict=False):
        w = weights["markov_head.markov_w1.weight"][before]
        if head.markov == "gated":
            w = torch.sigmoid(_project(weights, "markov_head.gate_proj", torch.cat([z, w]))) * w
        elif head.markov == "rnn":
            gate, candidate, out = _project(weights, "markov_head.joint_proj", torch.cat([memory, w, z])).chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
            w = torch.tanh(out)
        proposed.append(z @ output.T + weights["markov_head.markov_w2.weight"] @ w)
    return proposed


def _dflash2(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """The best tokens of a slot, of which the token before and the state choose."""
    slots, proposed, name = _proposing(head, weights, embeddings, tokens, states, drafted), [], "candidate_selector."
    for z, before in zip(slots, [tokens[-1], *drafted], strict=False):
        logits = head.multiplier * (z @ output.T)
        if head.softcap:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        asked = weights[f"{name}predecessor_codebook"][before] * (weights[f"{name}hidden_projection.weight"] @ z)
        scores = torch.full_like(logits, -torch.inf)
        for token in logits.argsort(descending=True)[: head.top_k].tolist():
            scores[token] = logits[token] + asked @ weights[f"{name}successor_codebook"][token]
        proposed.append(scores)
    return proposed


def _domino(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """What torch's own recurrent unit makes of the tokens before a slot, beside its state."""
    slots = _proposing(head, weights, embeddings, tokens, states, drafted)
    size = weights["prefix_gru.weight_hh_l0"].shape[1]
    with torch.random.fork_rng():  # its first weights are drawn, and this may run within a call
        gru = nn.GRU(embeddings.shape[1], size, bias=False, dtype=torch.float64)
    gru.load_state_dict({name: weights[f"prefix_gru.{name}"] for name in ("weight_ih_l0", "weight_hh_l0")})
    with torch.no_grad():
        prefixes = gru(embeddings[torch.tensor([tokens[-1], *drafted[:-1]])])[0]
    inner = nn.functional.silu(torch.cat([slots, prefixes], -1) @ weights["embed_proj.0.weight"].T)
    corrections = inner @ weights["embed_proj.2.weight"].T
    corrections[: head.pure] = 0
    return list(slots @ output.T + corrections)


def _medusa(head, weights, embeddings, output, tokens, states, drafted) -> list[Tensor]:
    """Each head reads the newest state alone, and proposes for its own distance."""
    proposed = []
    for number in range(len(drafted)):
        z = states[0][-1]
        for layer in range(head.layers):
            z = z + nn.functional.silu(_project(weights, f"{number}.{layer}.linear", z))
        proposed.append(weights[f"{number}.{head.layers}.weight"] @ z)
    return proposed


PROPOSALS = {"eagle3": _eagle3, "peagle": _peagle, "dflash": _dflash, "dspark": _dspark, "dflash2": _dflash2}
PROPOSALS |= {"domino": _domino, "medusa": _medusa}


def target_states(model: nn.Module, layer_ids: Sequence[int], input_ids: Tensor, **inputs) -> list[Tensor]:
    """The target's states [B, L, H] at these layer ids, of a forward over the whole text.

    The number of layers means the output of the last one, before the final norm; None means behind that norm, which is
    what transformers gives as the last of all.
    """
    last: list[Tensor] = []
    hook = model.get_decoder().norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    with torch.no_grad():
        *states, normed = model(input_ids, output_hidden_states=True, **inputs).hidden_states
    hook.remove()
    taken = dict(enumerate([*states, *last])) | {None: normed}
    return [taken[number] for number in layer_ids]
