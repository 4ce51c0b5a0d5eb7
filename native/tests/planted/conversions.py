"""Faults between caches of different layouts: in staging, converting and counting."""

from __future__ import annotations

from planted import Mutation

MUTATIONS = [
    Mutation(
        "a chunk counts before it is converted",
        "transfer/pull_chunks.cpp",
        "  if (!lane.staging) return count(now_s, pull, chunk);\n",
        "  if (lane.staging) convert(pull, sequence, chunk);\n  if (true) return count(now_s, pull, chunk);\n",
        "staging",
    ),
    Mutation(
        "tokens before the pull's first are converted",
        "transfer/pull_staging.cpp",
        "std::max(staged_origin, pull.first_token);",
        "staged_origin;",
        "staging",
    ),
    Mutation(
        "tokens after the pull's last are converted",
        "transfer/pull_staging.cpp",
        "std::min(staged_origin + chunk.run.blocks * pull.pool.block_tokens, pull.tokens);",
        "staged_origin + chunk.run.blocks * pull.pool.block_tokens;",
        "staging",
    ),
    Mutation("two chunks are staged in one slot", "transfer/staging.h", "    *free = pull;\n", "", "staging"),
    Mutation(
        "a stopped pull is still converted",
        "transfer/converter.cpp",
        "  std::erase_if(waiting_, [&](const Convert& chunk) { return chunk.pull == pull; });\n",
        "  (void)pull;\n",
        "staging",
    ),
    Mutation(
        "a conversion of an old generation counts",
        "transfer/pull.cpp",
        "  pull.converting.clear();\n",
        "",
        "staging",
    ),
    Mutation(
        "what waited for its conversion is not asked for again",
        "transfer/pull_peers.cpp",
        "      if (entry.second.connection == connection) pull.again.push_back(entry.second.run);\n",
        "",
        "staging",
    ),
    Mutation(
        "one tensor's conversion writes the other's",
        "layout/convert.cpp",
        "{&kPlanes[tensor % block.tensors], 1});",
        "{kPlanes, 2});",
        "staging",
    ),
    Mutation(
        "a layout that is not the pool's is believed",
        "transfer/handshake.cpp",
        "    check(geometry);\n",
        "",
        "handshake",
    ),
]
