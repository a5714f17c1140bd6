"""Make the embedded model ``tiny``: tokenizer, training run and report.

``tiny`` is a Llama with grouped-query attention whose weights in bf16 and tokenizer.json together stay under 8 MiB, so
that it can travel inside the package. It is trained on real text with passkey samples mixed in, so that both perplexity
and recall can be measured on it.

    python benchmarks/train_tiny.py tokenize --text text.txt.xz --out TOKENS    # half a minute on two cores
    python benchmarks/train_tiny.py train --tokens TOKENS --out MODEL           # 8 minutes on one H200
    python benchmarks/train_tiny.py report --model MODEL --wikitext test.txt

Shapes in the comments: b sequences, n tokens, h heads, d head dim.
"""

import argparse
import copy
import json
import lzma
import math
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

EOT, PAD = 0, 1
SIZE_LIMIT = 8 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
# The pre-tokenizer of the reference models: every digit is a token of its own, the first of a number carries the space.
PIECES = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is {key}."
KEY_DIGITS = 5


# ---------------------------------------------------------------- tokenize


def train_tokenizer(text: str, vocab: int):
    """Byte-level BPE of ``vocab`` entries over ``text``; ids 0 and 1 are <|endoftext|> and <|pad|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.replace("<|endoftext|>", "\n").splitlines(keepends=True), trainer)
    return tokenizer


def save_tokenizer(tokenizer, out: Path, max_length: int):
    """Write tokenizer.json, small (no white space, merges as strings), and its transformers config."""
    data = json.loads(tokenizer.to_str())
    data["model"]["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": None,
        "pad_token": "<|pad|>",
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": False,
        "add_eos_token": False,
        "added_tokens_decoder": {
            str(EOT): {"content": "<|endoftext|>", **special},
            str(PAD): {"content": "<|pad|>", **special},
        },
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def encode_documents(tokenizer, documents: list[str], chunk: int = 512) -> np.ndarray:
    """All documents as one uint16 array, each followed by <|endoftext|>; in chunks, to bound the memory."""
    parts = []
    for start in range(0, len(documents), chunk):
        for encoding in tokenizer.encode_batch(documents[start : start + chunk]):
            parts.append(np.array([*encoding.ids, EOT], dtype=np.uint16))
    return np.concatenate(parts)


def tokenize(args):
    """Train the tokenizer on a compressed text and write it with the tokens of the whole text."""
    if not 512 <= args.vocab <= 65536:
        raise ValueError(f"--vocab {args.vocab}: between 512 and 65536 (tokens are stored as uint16)")
    args.out.mkdir(parents=True, exist_ok=True)
    with lzma.open(args.text, "rt", encoding="utf-8") as file:
        text = file.read()
    began = time.perf_counter()
    save_tokenizer(train_tokenizer(text, args.vocab), args.out, args.max_length)
    tokenizer = load_tokenizer(args.out)  # as it was written, so that a mistake in writing shows here
    if tokenizer.get_vocab_size() != args.vocab:
        raise ValueError(f"the text gave {tokenizer.get_vocab_size()} entries, not --vocab {args.vocab}: ask for fewer")
    tokens = encode_documents(tokenizer, [d for d in text.split("<|endoftext|>") if d.strip()])
    np.save(args.out / "tokens.npy", tokens)
    size, seconds = len(text.encode()) / len(tokens), time.perf_counter() - began
    print(f"{len(tokens):,} tokens, {size:.3f} bytes each, in {seconds:.0f} s")
    for name in (*TOKENIZER_FILES, "tokens.npy"):
        print(f"{name}: {(args.out / name).stat().st_size:,} bytes")


# ---------------------------------------------------------------- samples


def load_tokenizer(folder: Path):
    """The tokenizer of ``folder`` as the plain `tokenizers` object."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(folder / "tokenizer.json"))


class Samples:
    """Draws training sequences from a token array: plain windows, passkey episodes, repeated passages.

    Passages are joined by tokens, yet give the tokens of the whole string: a passage starts, and ends before, a token
    that begins with a space and a letter, which always starts a piece of the pre-tokenizer. `check` holds this.
    """

    def __init__(self, tokens: np.ndarray, tokenizer, seed: int, answer_weight: float = 1.0):
        """``tokens``: [tokens] of any integer type; ``answer_weight``: loss weight of the answer's digits."""
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.rng = np.random.default_rng(seed)
        self.answer_weight = answer_weight
        words = [i for token, i in tokenizer.get_vocab().items() if re.match("Ġ[A-Za-z]", token)]
        self.cuts = np.flatnonzero(np.isin(tokens, np.array(words)))  # where a passage may begin or end
        if len(self.cuts) < 2:
            raise ValueError(
                f"{len(tokens)} tokens hold {len(self.cuts)} word starts: passages cannot be cut from them"
            )

    def window(self, length: int) -> np.ndarray:
        """``length`` consecutive tokens from a random place."""
        if length > len(self.tokens):
            raise ValueError(f"a window of {length} tokens is asked of a text of {len(self.tokens)}: give more text")
        start = self.rng.integers(len(self.tokens) - length + 1)
        return self.tokens[start : start + length]

    def passage(self, length: int) -> np.ndarray:
        """At most ``length`` tokens from one word start to another (a few fewer: it is cut at word starts)."""
        last = np.searchsorted(self.cuts, len(self.tokens) - length)
        first = self.cuts[self.rng.integers(max(1, min(last, len(self.cuts) - 1)))]
        end = self.cuts[np.searchsorted(self.cuts, first + length, side="right") - 1]
        return self.tokens[first:end]

    def encode(self, text: str) -> np.ndarray:
        """Tokens of ``text``, in the dtype of the token array."""
        return np.array(self.tokenizer.encode(text).ids, dtype=self.tokens.dtype)

    def episode(self, length: int) -> np.ndarray:
        """A passkey text of at most ``length`` tokens: passage, needle, passage, question and answer, <|endoftext|>.

        The last seven tokens are the five digits, the full stop and <|endoftext|>.
        """
        key = self.rng.integers(10 ** (KEY_DIGITS - 1), 10**KEY_DIGITS)
        depth, join, close, ask = self.rng.random(), *self.rng.choice([" ", "\n"], 3)
        question = self.encode(ask + QUESTION.format(key=key))
        close = "" if close == " " else close  # the passage that follows brings its own space
        room = length - len(question) - len(self.encode(join + NEEDLE.format(key=key) + close)) - 1
        if room < 0:
            raise ValueError(f"a passkey text does not fit {length} tokens: ask for at least {length - room}")
        before = self.passage(int(room * depth))
        needle = self.encode((join if len(before) else "") + NEEDLE.format(key=key) + close)
        after = self.passage(room - len(before))
        return np.concatenate([before, needle, after, question, np.array([EOT], dtype=self.tokens.dtype)])

    def recall_row(self, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and weights [length] of passkey texts in a row, their lengths log-uniform in 256..length."""
        row, weight = [], np.ones(length, dtype=np.float32)
        filled = 0
        while length - filled >= 128:
            wanted = int(math.exp(self.rng.uniform(math.log(min(256, length)), math.log(length))))
            row.append(self.episode(min(wanted, length - filled)))
            filled += len(row[-1])
            weight[filled - KEY_DIGITS - 2 : filled - 2] = self.answer_weight
        row.append(self.window(length - filled))
        return np.concatenate(row), weight

    def repeat_row(self, length: int) -> np.ndarray:
        """A window [length] in which 64 to 512 tokens come a second time, for induction."""
        row = self.window(length).copy()
        size = int(self.rng.integers(min(64, length // 4), min(512, length // 2) + 1))
        source = int(self.rng.integers(length - 2 * size + 1))
        target = int(self.rng.integers(source + size, length - size + 1))
        row[target : target + size] = row[source : source + size]
        return row

    def batch(self, rows: int, length: int, recall: float, repeat: float) -> tuple[np.ndarray, np.ndarray]:
        """Tokens int64 and loss weights float32, both [rows, length]; ``recall``, ``repeat``: shares of such rows."""
        tokens, weights = np.empty((rows, length), dtype=np.int64), np.ones((rows, length), dtype=np.float32)
        for i, draw in enumerate(self.rng.random(rows)):
            if draw < recall:
                tokens[i], weights[i] = self.recall_row(length)
            elif draw < recall + repeat:
                tokens[i] = self.repeat_row(length)
            else:
                tokens[i] = self.window(length)
        return tokens, weights

    def check(self, trials: int = 32):
        """Raise if a passkey text made of pieces is not what the tokenizer makes of its whole string."""
        for _ in range(trials):
            ids = self.episode(512).tolist()
            again = self.tokenizer.encode(self.tokenizer.decode(ids, skip_special_tokens=False)).ids
            if ids != again:
                pairs = zip(ids, again, strict=False)  # a difference in length alone shows at the end of the shorter
                same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(again)))
                near = slice(max(0, same - 3), same + 4)
                raise ValueError(f"joined tokens differ from the whole string's at {same}: {ids[near]}, {again[near]}")


# ---------------------------------------------------------------- model


def build_model(args, vocab: int):
    """A new LlamaForCausalLM in float32; projections into the residual stream start smaller (GPT-2's rule)."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=args.hidden,
        intermediate_size=args.intermediate,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=args.head_dim,
        max_position_embeddings=args.long_context,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
        tie_word_embeddings=True,
        bos_token_id=EOT,
        eos_token_id=EOT,
        pad_token_id=PAD,
        dtype="float32",
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                out.weight.mul_((2 * args.layers) ** -0.5)
    return model


def check_size(model, folder: Path) -> int:
    """Bytes of the weights in bf16 and of tokenizer.json; raise if above 8 MiB."""
    header = 8192  # of model.safetensors, generously
    size = 2 * sum(p.numel() for p in model.parameters()) + header + (folder / "tokenizer.json").stat().st_size
    if size > SIZE_LIMIT:
        raise ValueError(
            f"weights and tokenizer take {size:,} bytes, {SIZE_LIMIT:,} are allowed: lower --intermediate or --layers"
        )
    return size


def rope_tables(config, n: int, device):
    """cos and sin [n, d] in float32, halves repeated as transformers' rotate_half expects."""
    import torch

    d = config.head_dim
    frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, d, 2, device=device, dtype=torch.float64) / d)
    angle = torch.arange(n, device=device, dtype=torch.float64)[:, None] * frequency
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos().float(), angle.sin().float()


def rotate(x, cos, sin):
    """RoPE of ``x`` [b, h, n, d], computed in float32, returned in the dtype of ``x``."""
    import torch

    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def normalize(x, norm):
    """RMS norm of ``x`` [b, n, hidden] with the weight of transformers' module ``norm``."""
    import torch.nn.functional as F

    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def forward(model, ids, cos, sin):
    """Logits [b, n, vocab] of ``ids`` [b, n], from the parameters of the transformers model.

    Written out because torch.compile of transformers' own forward builds an explicit mask below torch 2.14, which
    keeps SDPA from its flash kernel. `check_forward` holds it against transformers.
    """
    import torch.nn.functional as F

    b, n = ids.shape
    d = cos.shape[-1]
    x = F.embedding(ids, model.model.embed_tokens.weight)
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        y = normalize(x, layer.input_layernorm)
        q, k, v = (w(y).view(b, n, -1, d).transpose(1, 2) for w in (attn.q_proj, attn.k_proj, attn.v_proj))
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + attn.o_proj(y.transpose(1, 2).reshape(b, n, -1))
        y = normalize(x, layer.post_attention_layernorm)
        x = x + mlp.down_proj(F.silu(mlp.gate_proj(y)) * mlp.up_proj(y))
    return F.linear(normalize(x, model.model.norm), model.model.embed_tokens.weight)


def check_forward(model, vocab: int):
    """Raise unless `forward` gives transformers' logits (float32, CPU, relative to their scale)."""
    import torch

    ids = torch.arange(64).mul(37).remainder(vocab)[None]
    cos, sin = rope_tables(model.config, 64, "cpu")
    with torch.no_grad():
        mine, theirs = forward(model, ids, cos, sin), model(ids).logits
    error = ((mine - theirs).abs().max() / theirs.abs().max()).item()
    if not error < 1e-4:
        raise ValueError(f"the training forward is {error:.2e} away from transformers' logits, 1e-4 is allowed")


def weighted_loss(model, ids, weights, cos, sin):
    """Mean cross entropy of the next token over ``ids`` [b, n + 1], each target weighted by ``weights`` [b, n + 1]."""
    import torch.nn.functional as F

    logits = forward(model, ids[:, :-1], cos, sin)
    loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weights = weights[:, 1:].flatten()
    return (loss * weights).sum() / weights.sum()


# ---------------------------------------------------------------- train


@dataclass
class Run:
    """What the training loop holds: model, optimizer, data, loss (compiled) and time frame (perf_counter seconds)."""

    args: argparse.Namespace
    model: object
    optimizer: object
    samples: Samples
    loss: object
    tables: dict  # context -> (cos, sin)
    held: dict  # name -> (tokens, weights) on the device
    began: float = 0.0
    ends: float = 0.0

    def progress(self) -> float:
        """Share of the time that is used, 0..1."""
        return min(1.0, (time.perf_counter() - self.began) / (self.ends - self.began))


def learning_rate(args, progress: float, step: int) -> float:
    """Warm-up over ``warmup`` steps, then cosine over the time budget down to ``final_lr`` times the peak."""
    cosine = args.final_lr + (1 - args.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))
    return args.lr * min(1.0, (step + 1) / args.warmup) * cosine


def make_optimizer(args, model, fused: bool):
    """AdamW; matrices decay, norm weights do not."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def to_device(device, tokens: np.ndarray, weights: np.ndarray):
    """Both arrays as tensors on the device, copied without waiting."""
    import torch

    pair = (torch.from_numpy(tokens), torch.from_numpy(weights))
    if device.type == "cuda":
        pair = tuple(t.pin_memory() for t in pair)
    return tuple(t.to(device, non_blocking=True) for t in pair)


def backward(run: Run, device, context: int):
    """Draw a batch of ``context`` tokens a sequence, add its gradients; returns the loss, a tensor."""
    import torch

    args = run.args
    rows = max(1, args.batch_tokens // context)
    ids, weights = to_device(device, *run.samples.batch(rows, context + 1, args.recall, args.repeat))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = run.loss(run.model, ids, weights, *run.tables[context])
    loss.backward()
    return loss.detach()


def held_out(run: Run, device) -> dict[str, float]:
    """Loss on held-out text, and the share of right answer digits (teacher-forced) in held-out passkey texts."""
    import torch

    with torch.no_grad(), torch.autocast(device.type, dtype=torch.bfloat16):
        ids, weights = run.held["text"]
        tables = run.tables[run.args.context]
        loss = weighted_loss(run.model, ids, weights, *tables).item()
        ids, weights = run.held["recall"]
        hits = forward(run.model, ids[:, :-1], *tables).argmax(-1) == ids[:, 1:]
        return {
            "held_out_loss": round(loss, 4),
            "recall_digits": round(hits[weights[:, 1:] > 1].float().mean().item(), 4),
        }


def train_loop(run: Run, device) -> dict:
    """Train until the time is used; prints progress, saves the model now and then; returns the last figures."""
    import torch

    args, step, tokens, losses = run.args, 0, 0, []
    shown = probed = saved = time.perf_counter()
    shown_tokens, last = 0, {}
    while (progress := run.progress()) < 1.0:
        context = args.context if progress < 1 - args.long_share else args.long_context
        rate = learning_rate(args, progress, step)
        for group in run.optimizer.param_groups:
            group["lr"] = rate
        losses.append(backward(run, device, context))
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), args.clip)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        step, tokens = step + 1, tokens + max(1, args.batch_tokens // context) * context
        if step % args.sync_steps:
            continue
        loss = torch.stack(losses).mean().item()  # waits for the device, so the clock below is honest
        if not math.isfinite(loss):
            raise FloatingPointError(f"loss {loss} at step {step}, learning rate {rate:.2e}: try a lower --lr")
        now = time.perf_counter()
        if now - shown >= args.log_seconds:
            speed = (tokens - shown_tokens) / (now - shown)
            print(
                f"step {step} tokens {tokens / 1e6:.1f}M loss {loss:.4f} lr {rate:.2e} {speed / 1e3:.0f}k tokens/s",
                flush=True,
            )
            last = {
                "step": step,
                "tokens": tokens,
                "train_loss": round(loss, 4),
                "lr": rate,
                "tokens_per_s": round(speed),
            }
            shown, shown_tokens, losses = now, tokens, []
        if now - probed >= args.probe_seconds:
            print(f"step {step} {held_out(run, device)}", flush=True)
            probed = now
        if now - saved >= args.save_seconds:
            save_model(run.model, args)
            saved = now
    return {
        **last,
        "step": step,
        "tokens": tokens,
        "epochs": round(tokens / len(run.samples.tokens), 2),
        **held_out(run, device),
    }


def save_model(model, args):
    """Write the model in bf16 as transformers reads it, with the tokenizer files beside it."""
    import torch

    args.out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(model).to("cpu", torch.bfloat16).save_pretrained(args.out)
    for name in TOKENIZER_FILES:
        shutil.copyfile(args.tokens / name, args.out / name)


def prepare(args, device) -> Run:
    """Load the tokens, hold out their end, build and check model and samples, compile both contexts."""
    import torch

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    tokens = np.load(args.tokens / "tokens.npy")
    tokenizer = load_tokenizer(args.tokens)
    model = build_model(args, tokenizer.get_vocab_size())
    check_forward(model, tokenizer.get_vocab_size())
    count, size = sum(p.numel() for p in model.parameters()), check_size(model, args.tokens)
    print(f"{count:,} parameters; {size:,} of {SIZE_LIMIT:,} bytes", flush=True)
    samples = Samples(tokens[: -args.held_tokens], tokenizer, args.seed, args.answer_weight)
    samples.check()
    probe = Samples(
        tokens[-args.held_tokens :], tokenizer, args.seed + 1, answer_weight=2.0
    )  # above 1 marks the digits
    held = {
        "text": to_device(device, *probe.batch(args.held_rows, args.context + 1, recall=0.0, repeat=0.0)),
        "recall": to_device(device, *probe.batch(args.held_rows, args.context + 1, recall=1.0, repeat=0.0)),
    }
    model.to(device).train()
    tables = {n: rope_tables(model.config, n, device) for n in (args.context, args.long_context)}
    loss = weighted_loss if args.no_compile else torch.compile(weighted_loss, dynamic=False)
    run = Run(args, model, make_optimizer(args, model, fused=device.type == "cuda"), samples, loss, tables, held)
    for context in {args.context, args.long_context}:
        value = backward(run, device, context).item()
        print(
            f"context {context}: first loss {value:.4f} (uniform: {math.log(tokenizer.get_vocab_size()):.4f})",
            flush=True,
        )
    run.optimizer.zero_grad(set_to_none=True)
    return run


def train(args):
    """Train for ``minutes``, compilation included, and save. Seeded, but the schedule follows the clock."""
    import torch

    ends = time.perf_counter() + 60 * args.minutes
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    run = prepare(args, device)
    run.began, run.ends = time.perf_counter(), ends
    if run.ends <= run.began:
        raise ValueError(f"--minutes {args.minutes} were over before the first step: give more, or --no-compile")
    print(f"prepared, {run.ends - run.began:.0f} s of training on {device}", flush=True)
    figures = train_loop(run, device)
    save_model(run.model, args)
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("run", "tokens", "out")
    }
    (args.out / "training.json").write_text(
        json.dumps({**figures, "torch": torch.__version__, "settings": settings}, indent=1)
    )
    size = sum((args.out / name).stat().st_size for name in ("model.safetensors", "tokenizer.json"))
    print(
        f"{json.dumps(figures)}\nsaved to {args.out}: model.safetensors and tokenizer.json take {size:,} bytes",
        flush=True,
    )
    if size > SIZE_LIMIT:
        raise ValueError(f"{args.out} takes {size:,} bytes, {SIZE_LIMIT:,} are allowed")


# ---------------------------------------------------------------- report


def text_loss(model, ids: np.ndarray, window: int, device) -> float:
    """Mean nats a token over non-overlapping windows; the first token of each, without context, is not counted."""
    import torch
    import torch.nn.functional as F

    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, window):
        part = torch.from_numpy(ids[start : start + window].astype(np.int64))[None].to(device)
        if part.shape[1] < 2:
            continue
        with torch.no_grad():
            logits = model(part, use_cache=False).logits[0, :-1].float()
        total += F.cross_entropy(logits, part[0, 1:], reduction="sum").item()
        count += part.shape[1] - 1
    return total / count


def recall_accuracy(model, samples: Samples, length: int, trials: int, device) -> float:
    """Share of ``trials`` passkey texts of at most ``length`` tokens whose five digits greedy decoding finds."""
    import torch

    found = 0
    for _ in range(trials):
        ids = samples.episode(length).astype(np.int64)
        prompt, answer = ids[: -KEY_DIGITS - 2], ids[-KEY_DIGITS - 2 : -2]
        prompt = torch.from_numpy(prompt)[None].to(device)
        with torch.no_grad():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=KEY_DIGITS, do_sample=False
            )
        found += out[0, prompt.shape[1] :].tolist() == answer.tolist()
    return found / trials


def report(args):
    """Measure WikiText-2 loss and passkey recall of a saved model, print them and write report.json beside it."""
    import torch
    from transformers import AutoModelForCausalLM

    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).to(device).eval()
    tokenizer = load_tokenizer(args.model)
    text = args.wikitext.read_text(encoding="utf-8")
    ids = np.array(tokenizer.encode(text).ids, dtype=np.uint16)
    used = ids if args.max_tokens is None else ids[: args.max_tokens]
    loss = text_loss(model, used, args.window, device)
    per_text = loss * len(ids)  # as if every token cost the mean
    samples = Samples(ids, tokenizer, args.seed)
    samples.check()
    figures = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "window": args.window,
        "tokens": len(used),
        "loss_per_token": round(loss, 4),
        "perplexity_per_token": round(math.exp(loss), 3),
        "bits_per_byte": round(per_text / math.log(2) / len(text.encode()), 4),
        "perplexity_per_word": round(math.exp(per_text / len(text.split())), 2),
        "passkey_trials": args.trials,
        "passkey": {str(n): recall_accuracy(model, samples, n, args.trials, device) for n in args.lengths},
    }
    path = args.report or args.model / "report.json"
    path.write_text(json.dumps(figures, indent=1))
    print(json.dumps(figures, indent=1))


# ---------------------------------------------------------------- command line


def add_train_arguments(p):
    """Flags of `train`; the defaults are the ones that `tiny` is trained with."""
    p.add_argument("--tokens", type=Path, required=True, help="folder that `tokenize` wrote")
    p.add_argument("--out", type=Path, required=True, help="folder for the model")
    p.add_argument(
        "--minutes", type=float, default=8.0, help="wall-clock budget, compilation included, imports and saving not"
    )
    p.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    p.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    p.add_argument("--seed", type=int, default=0)
    for name, value in (
        ("hidden", 256),
        ("layers", 5),
        ("heads", 4),
        ("kv-heads", 2),
        ("head-dim", 64),
        ("intermediate", 544),
    ):
        p.add_argument(f"--{name}", type=int, default=value)
    p.add_argument("--rope-theta", type=float, default=50000.0)
    p.add_argument("--context", type=int, default=2048)
    p.add_argument(
        "--long-context", type=int, default=4096, help="context of the last part, and max_position_embeddings"
    )
    p.add_argument("--long-share", type=float, default=0.25, help="share of the time at the long context")
    p.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    p.add_argument("--lr", type=float, default=3e-3, help="peak learning rate")
    p.add_argument("--final-lr", type=float, default=0.01, help="last learning rate, as a share of the peak")
    p.add_argument("--warmup", type=int, default=200, help="steps")
    p.add_argument("--weight-decay", type=float, default=0.1)
    p.add_argument("--clip", type=float, default=1.0, help="largest gradient norm")
    p.add_argument("--recall", type=float, default=0.1, help="share of sequences made of passkey texts")
    p.add_argument("--repeat", type=float, default=0.03, help="share of sequences with a repeated passage")
    p.add_argument("--answer-weight", type=float, default=5.0, help="loss weight of the answer's digits")
    p.add_argument(
        "--held-tokens", type=int, default=131072, help="tokens at the end of the text that are not trained on"
    )
    p.add_argument("--held-rows", type=int, default=16, help="sequences of each held-out probe")
    p.add_argument("--sync-steps", type=int, default=10, help="steps between reading the loss")
    for name, value in (("log", 5.0), ("probe", 30.0), ("save", 120.0)):
        p.add_argument(f"--{name}-seconds", type=float, default=value)
    p.set_defaults(run=train)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; ``run`` is the function of the subcommand."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    p = commands.add_parser("tokenize", help="train the tokenizer, write the tokens")
    p.add_argument("--text", type=Path, required=True, help="text, xz-compressed, documents separated by <|endoftext|>")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--max-length", type=int, default=4096, help="model_max_length of the tokenizer")
    p.set_defaults(run=tokenize)
    add_train_arguments(commands.add_parser("train", help="train the model"))
    p = commands.add_parser("report", help="measure a saved model")
    p.add_argument("--model", type=Path, required=True)
    p.add_argument("--wikitext", type=Path, required=True, help="WikiText-2 test.txt")
    p.add_argument("--report", type=Path, help="where to write; default: report.json in the model's folder")
    p.add_argument("--device", help="cuda or cpu; default: cuda where there is one")
    p.add_argument("--window", type=int, default=2048)
    p.add_argument("--max-tokens", type=int, help="measure the loss on the first tokens only")
    p.add_argument("--trials", type=int, default=50)
    p.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    p.add_argument("--seed", type=int, default=1234)
    p.set_defaults(run=report)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the subcommand of ``argv`` (default: the process's)."""
    args = parse(argv)
    args.run(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
