"""Figures as JSON values and as lines to read: plans, checkpoints, answers."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mlxmoe.budget import Plan
from mlxmoe.checkpoint import Checkpoint
from mlxmoe.config import KimiConfig
from mlxmoe.events import ExpertStats, Finished, Reply
from mlxmoe.transcript import ToolCall


def size_text(size: int) -> str:
    """Bytes to read, in the largest decimal unit under them: 17.5 MB, 1560.9 GB."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6)):
        if size >= factor:
            return f"{size / factor:,.2f} {unit}"
    return f"{size / 10**3:,.1f} kB"


def call_line(call: ToolCall) -> str:
    """`→ name({"key": …})`."""
    return f"→ {call.name}({_arguments(call)})"


def _arguments(call: ToolCall) -> str:
    if isinstance(call.arguments, str):
        return call.arguments
    return json.dumps(dict(call.arguments), ensure_ascii=False)


def stats_line(finished: Finished) -> str:
    """One line of what an answer took."""
    stats = finished.stats
    return (
        f"[{finished.reason}] {stats.prefill_tokens} prompt tokens in "
        f"{stats.prefill_seconds:.1f} s, {stats.decode_tokens} tokens at "
        f"{_rate(stats.decode_tokens, stats.decode_seconds):.2f}/s{_picks([stats.experts])}, "
        f"{size_text(stats.experts.bytes_read)} read, peak {size_text(stats.peak_memory_bytes)} "
        f"of {size_text(stats.planned_memory_bytes)} planned"
    )


def turn_line(effort: str, rounds: Sequence[Finished]) -> str:
    """One line of what a turn of a chat took, of one request or more."""
    stats = [finished.stats for finished in rounds]
    tokens = sum(one.decode_tokens for one in stats)
    thinking = sum(finished.usage.reasoning_tokens for finished in rounds)
    head = effort if rounds[-1].reason == "stop" else f"{effort}, {rounds[-1].reason}"
    more = f", {len(rounds)} rounds" if len(rounds) > 1 else ""
    return (
        f"[{head}] {thinking} thinking tokens of {tokens} at "
        f"{_rate(tokens, sum(one.decode_seconds for one in stats)):.1f}/s, "
        f"{sum(one.prefill_tokens for one in stats)} prompt tokens in "
        f"{sum(one.prefill_seconds for one in stats):.1f} s{more}"
        f"{_picks([one.experts for one in stats])}, "
        f"{size_text(sum(one.experts.bytes_read for one in stats))} read"
    )


def _rate(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


def _picks(experts: Sequence[ExpertStats]) -> str:
    """`, 71% of 1200 expert picks in memory`, "" where there are none."""
    hits = sum(one.hits for one in experts)
    picks = hits + sum(one.misses + one.rescues for one in experts)
    return f", {100 * hits / picks:.0f}% of {picks} expert picks in memory" if picks else ""


def reply_values(reply: Reply) -> dict[str, Any]:
    """What `run --json` prints."""
    return {
        "reasoning": reply.reasoning,
        "content": reply.content,
        "tool_calls": [
            {
                "name": call.name,
                "arguments": call.arguments
                if isinstance(call.arguments, str)
                else dict(call.arguments),
            }
            for call in reply.tool_calls
        ],
        "finish_reason": reply.finish_reason,
        "usage": asdict(reply.usage),
        "stats": asdict(reply.stats),
    }


def plan_values(plan: Plan) -> dict[str, Any]:
    """What `plan --json` prints: the plan's fields and their sums."""
    return asdict(plan) | {"slot_bytes": plan.slot_bytes, "planned_bytes": plan.planned_bytes}


def plan_lines(plan: Plan) -> list[str]:
    """A plan to read."""
    share = 100 * plan.slots / plan.experts if plan.experts else 100.0
    rows = [
        ("trunk", plan.trunk_bytes, "always in memory"),
        (
            "state",
            plan.state_bytes,
            f"{plan.context:,} tokens of context, {size_text(plan.state_bytes_per_1k)} "
            "for each 1,024",
        ),
        ("scratch", plan.scratch_bytes, f"spans of up to {plan.span:,} prompt tokens"),
        (
            "slots",
            plan.slot_bytes,
            f"{plan.slots:,} of {plan.experts:,} experts ({share:.1f}%), "
            f"{size_text(plan.record_bytes)} each",
        ),
        ("planned", plan.planned_bytes, f"of a budget of {size_text(plan.budget_bytes)}"),
        ("floor", plan.floor_bytes, "the least that runs"),
        ("working set", plan.working_set_bytes, "expert bytes that one token touches"),
    ]
    lines = [f"{name:<12} {size_text(size):>12}  {note}" for name, size, note in rows]
    return [*lines, f"{'residency':<12} {plan.residency:>12}"]


def info_values(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `info --json` prints."""
    config, manifest = checkpoint.config, checkpoint.manifest
    values: dict[str, Any] = {
        "folder": str(manifest.folder),
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "moe_layers": len(manifest.experts),
        "experts_per_layer": manifest.experts[0].num_experts if manifest.experts else 0,
        "experts_per_token": config.top_k,
        "context": config.context_length,
        "files": len(manifest.files),
        "file_bytes": sum(file.size for file in manifest.files),
        "trunk_bytes": manifest.trunk_bytes,
        "expert_bytes": manifest.expert_bytes,
        "record_bytes": manifest.record_bytes,
        "extents_per_record": len(manifest.experts[0].extents(0)) if manifest.experts else 0,
    }
    if isinstance(config, KimiConfig):
        values |= {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "full_attention_layers": list(config.full_attention_layers),
            "index_topk": config.dsa.topk if config.dsa else None,
        }
    return values


def info_lines(checkpoint: Checkpoint) -> list[str]:
    """A checkpoint to read."""
    values = info_values(checkpoint)
    lines = []
    for name, value in values.items():
        if name.endswith("_bytes"):
            lines.append(f"{name.replace('_', ' '):<22} {size_text(value)}")
        else:
            lines.append(f"{name.replace('_', ' '):<22} {value}")
    return lines
