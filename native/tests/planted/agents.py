"""Faults in admission and in the shell: handshakes, connections, wake-ups, fences."""

# The texts are lines as they stand in the sources.
# ruff: noqa: E501
from __future__ import annotations

from planted import Mutation

MUTATIONS = [
    Mutation(
        "a slot is credited twice",
        "transfer/core.cpp",
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n",
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n"
        "                     out_.send(e.connection, frames::CreditSlot{e.slot});\n",
    ),
    Mutation(
        "the sink's proof is not compared",
        "transfer/handshake.cpp",
        "  if (!same(identify.proof, proof(Side::sink, identify.identity))) {",
        "  if (false) {",
        "handshake",
    ),
    Mutation(
        "the source's proof is not compared",
        "transfer/handshake.cpp",
        "  if (!same(welcome.proof, proof(Side::source, welcome.identity))) {",
        "  if (false) {",
        "handshake",
    ),
    Mutation(
        "a proof of one side is good for the other",
        "transfer/handshake.cpp",
        '      .add(view(of == Side::sink ? "sink" : "source"))\n',
        '      .add(view(of == Side::sink ? "sink" : "sink"))\n',
        "handshake",
    ),
    Mutation(
        "a proof does not cover the identity",
        "transfer/handshake.cpp",
        "      .add(said)\n",
        "",
        "handshake",
    ),
    Mutation(
        "a proof does not cover the peer's nonce",
        "transfer/handshake.cpp",
        "      .add(own_is_sink ? own_nonce_ : peer_nonce_)\n      .add(own_is_sink ? peer_nonce_ : own_nonce_)\n",
        "",
        "handshake",
    ),
    Mutation(
        "the incarnation is not compared",
        "transfer/handshake.cpp",
        "  if (welcome.identity.incarnation != expected_incarnation_) {",
        "  if (false) {",
        "handshake",
    ),
    Mutation(
        "a source may switch the checksum off",
        "transfer/handshake.cpp",
        "  if (options_.checksum && !agreed.checksum) return Outcome::malformed;\n",
        "",
        "handshake",
    ),
    Mutation(
        "a source may name a backend that the sink does not have",
        "transfer/handshake.cpp",
        "  if (std::find(have.begin(), have.end(), agreed.backend) == have.end()) return Outcome::malformed;\n",
        "",
        "handshake",
    ),
    Mutation(
        "the size of blocks is not compared",
        "transfer/handshake.cpp",
        "  if (sink.block_bytes != source.block_bytes) {",
        "  if (false) {",
        "handshake",
    ),
    Mutation(
        "a silent peer stays connected",
        "transfer/core.cpp",
        "    if (now_s >= give_up_s) {\n      silent.push_back(id);\n    } else {",
        "    if (false) {\n      silent.push_back(id);\n    } else {",
        "handshake",
    ),
    Mutation(
        "any number of connections is accepted",
        "transfer/core.cpp",
        "connections_.size() >= options_.limits.connections)) {",
        "false)) {",
        "handshake",
    ),
    Mutation(
        "frames of pulls are taken before the handshake",
        "transfer/core.cpp",
        "  if (!handshake.agreed()) return settle(",
        "  if (!handshake.agreed() && type <= FrameType::agreed) return settle(",
        "handshake",
    ),
    Mutation(
        "commands do not wake the thread",
        "transfer/agent.cpp",
        "    if (actions_.empty() && core_.wake_s() >= wake_s) return;",
        "    return;",
        "agents_wake",
    ),
    Mutation(
        "alarms that commands set do not wake the thread",
        "transfer/agent.cpp",
        "    if (actions_.empty() && core_.wake_s() >= wake_s) return;",
        "    if (actions_.empty()) return;",
        "agents_wake",
    ),
    Mutation(
        "a post does not wake the thread",
        "transfer/agent.cpp",
        "    if (actions_.empty() && core_.wake_s() >= wake_s) return;",
        "    if (core_.wake_s() >= wake_s) return;",
        "agents_tell_every",
    ),
    Mutation(
        "the thread does not wake for alarms",
        "transfer/agent.cpp",
        "  double wake_s = accept_again_s_ == 0 ? alarm_s :",
        "  double wake_s = accept_again_s_ == 0 ? now_s() + 4000 :",
        "agents_wake",
    ),
    Mutation(
        "reports are not announced",
        "transfer/agent.cpp",
        "  if (!quiet || reports_.empty()) return;\n",
        "  return;\n",
        "traffic_over_tcp",
    ),
    Mutation(
        "a fence is up before an adapter has ended its writes",
        "transfer/agent_connections.cpp",
        "    if (!writing.empty() && now < fence.until_s) return false;\n    for (const ConnectionId id : writing) drop",
        "    if (false) return false;\n    for (const ConnectionId id : {ConnectionId{0}}) drop",
        "agents_tell",
    ),
    Mutation(
        "writes that do not end keep a fence down for ever",
        "transfer/agent_connections.cpp",
        "    if (!writing.empty() && now < fence.until_s) return false;",
        "    if (!writing.empty()) return false;",
        "agents_tell",
    ),
    Mutation(
        "a proof is waited for without end",
        "transfer/agent_connections.cpp",
        "  if (!proof && !broken && now_s() < connection.answer_by_s) return;",
        "  if (!proof && !broken) return;",
        "agents_take",
    ),
    Mutation(
        "a closed agent leaves its pulls without an end",
        "transfer/agent.cpp",
        "    const Event event = Shutdown{};\n    step_locked({&event, 1});\n",
        "",
        "sudden_ends_over_tcp",
    ),
]
