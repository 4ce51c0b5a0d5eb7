// Invariants: every step of the core is checked against the owner's books and the frames on the wire.
#include <algorithm>

#include "tests/model/world.h"

namespace baton::model {

void Node::check_action(const Action& action) {
  if (const auto* serve = std::get_if<Serve>(&action)) check_serve(*serve);
  if (const auto* place = std::get_if<Place>(&action)) check_place(*place);
  if (const auto* send = std::get_if<Send>(&action)) check_send(*send);
  if (const auto* close = std::get_if<Close>(&action)) {
    world.note(*close);
    forget(close->connection);
    closing_.insert(close->connection);
  }
  if (const auto* stop = std::get_if<StopPlacing>(&action)) {
    require(stopping_.insert(stop->pull).second, "a fence was asked for while one is going up");
  }
}

// ---------------------------------------------------------------- what sinks said, and what they are owed

void Node::hear(const Event& event) {
  if (const auto* accepted = std::get_if<Accepted>(&event)) known_.insert(accepted->connection);
  if (const auto* connected = std::get_if<Connected>(&event)) known_.insert(connected->connection);
  const auto has_read = [&](const auto& chunk) {
    const auto at = served_.find({{chunk.connection, chunk.pull}, chunk.sequence});
    if (at != served_.end()) at->second.read = true;
  };
  if (const auto* served = std::get_if<Served>(&event)) has_read(*served);
  if (const auto* granted = std::get_if<Granted>(&event)) has_read(*granted);
  if (const auto* frame = std::get_if<FrameArrived>(&event)) hear_frame(frame->connection, frame->frame);
}

void Node::hear_frame(ConnectionId connection, const Blob& frame) {
  if (frame.empty() || connection % 2 == 0 || !known_.contains(connection) || closing_.contains(connection)) return;
  const auto type = static_cast<FrameType>(frame.front());
  const Bytes body = Bytes(frame).subspan(1);
  if (const auto ask = decode<frames::Ask>(body); type == FrameType::ask && ask) {
    // A sink whose connection died asks again, to be notified here.
    asks_.try_emplace({connection, ask->pull}, Asked{*ask, world.now_s}).first->second.ask = *ask;
    heard_last_s_ = world.now_s;
  } else if (const auto alive = decode<frames::KeepAlive>(body); type == FrameType::keep_alive && alive) {
    heard_last_s_ = world.now_s;
    if (const auto at = asks_.find({connection, alive->pull}); at != asks_.end()) {
      heard_s_[at->second.ask.key] = at->second.heard_s = world.now_s;
    }
  } else if (const auto release = decode<frames::Release>(body); type == FrameType::release && release) {
    const auto book = leases.find(release->key);
    if (book != leases.end() && book->second.live) return;
    std::erase_if(asks_,
                  [&](const auto& entry) { return entry.second.ask.key == release->key; });  // These asks were parked.
  }
}

void Node::forget(ConnectionId connection) {
  std::erase_if(asks_, [&](const auto& entry) { return entry.first.first == connection; });
  std::erase_if(served_, [&](const auto& entry) { return entry.first.first.first == connection; });
}

void Node::check_notified(const Key& key, const char* what) const {
  for (const auto& [id, asked] : asks_) require(asked.ask.key != key, what);
}

// A trailer that names a generation says: nothing else was in these blocks from the first byte read to the last.
void Node::check_send(const Send& send) {
  require(known_.contains(send.connection), "something was sent on a connection that is gone");
  const auto type = static_cast<FrameType>(send.frame[kLengthBytes]);
  const Bytes body = Bytes(send.frame).subspan(kLengthBytes + 1);
  if (type == FrameType::ended) {
    const auto ended = decode<frames::Ended>(body);
    const ReaderId reader{send.connection, ended->pull};
    asks_.erase(reader);
    std::erase_if(served_, [&](const auto& entry) { return entry.first.first == reader; });
  } else if (type == FrameType::revoked) {
    notified_.insert({send.connection, decode<frames::Revoked>(body)->pull});
  } else if (type == FrameType::ask) {
    latest_pull = std::max(latest_pull, decode<frames::Ask>(body)->pull);
  } else if (type == FrameType::chunk_end) {
    const auto end = decode<frames::ChunkEnd>(body);
    const auto chunk = served_.find({{send.connection, end->pull}, end->sequence});
    const Chunk was = chunk == served_.end() ? Chunk{} : chunk->second;
    require(chunk == served_.end() || was.read, "a trailer was sent before the bytes were read");
    if (chunk != served_.end()) served_.erase(chunk);
    if (end->generation == 0) return;
    const auto lease = was.life == 0 ? leases.end() : leases.find(world.key_of_life(was.life));
    require(lease != leases.end() && lease->second.open && lease->second.life == was.life &&
                was.generation == end->generation,
            "a trailer vouches for blocks that were given back");
  }
}

void Node::check_serve(const Serve& chunk) {
  require(!chunk.blocks.empty() && chunk.layer < kLayers, "a chunk of nothing was served");
  require(chunk.blocks.size() * kBlockBytes <= options.limits.chunk_bytes, "a chunk of too many blocks was served");
  const ReaderId reader{chunk.connection, chunk.pull};
  const auto asked = asks_.find(reader);
  require(asked != asks_.end(), "a chunk was served that belongs to no ask");
  std::uint32_t outstanding = 0;
  for (const auto& [at, kept] : served_) outstanding += at.first == reader;
  require(outstanding < options.limits.chunks_served, "more chunks of a pull are being served than the limits allow");
  const LeaseBook& of = leases.at(asked->second.ask.key);
  const bool fresh = served_.try_emplace({reader, chunk.sequence}, Chunk{of.life, of.generation}).second;
  require(fresh, "a sequence number was served twice at a time");
  for (const std::uint32_t index : chunk.blocks) {
    const Block& block = memory->at(index);
    const auto book = leases.find(block.key);
    require(block.use == Use::lease && book != leases.end() && book->second.live && book->second.open,
            "a block was served that no lease holds");
    const auto& lease = book->second;
    const auto position = std::find(lease.blocks.begin(), lease.blocks.end(), index) - lease.blocks.begin();
    require(
        lease.ready[chunk.layer] >= std::min<std::uint64_t>((position + 1) * kBlockTokens, asked->second.ask.tokens),
        "a block was served beyond the watermark");
    require(lease.key == asked->second.ask.key && position >= asked->second.ask.first_block &&
                position < asked->second.ask.first_block + asked->second.ask.blocks,
            "a block was served that was not asked for");
  }
}

void Node::check_place(const Place& chunk) {
  require(!stopping_.contains(chunk.pull), "a write was begun while the pull's writes are being stopped");
  require(!chunk.blocks.empty() && chunk.layer < kLayers, "a chunk of nothing was placed");
  for (const std::uint32_t index : chunk.blocks) {
    const Block& block = memory->at(index);
    require(block.use == Use::pull, "a write into a block that no pull holds");
    const auto [known, added] = keys_of_pulls_.try_emplace(chunk.pull, block.key);
    require(known->second == block.key, "a write into another pull's block");
  }
}

void Node::check_limits() const {
  const Limits& limits = options.limits;
  const Stats stats = core.stats();
  require(stats.leases <= limits.leases && stats.pulls <= limits.pulls && stats.parked <= limits.parked,
          "more leases, pulls or parked asks than the limits allow");
  require(stats.peers <= limits.peers, "more peers than the limits allow");
  require(stats.readers <= stats.leases * limits.readers_per_lease + stats.parked, "more readers than can be");
  require(stats.parked == 0 || world.now_s <= heard_last_s_ + options.lease_ttl_s,
          "an ask is parked though its sink is silent");
  require(stats.connections <= limits.connections + limits.peers, "more connections than the limits allow");
  for (const auto& [id, end] : ends) {
    require(end->serving.size() <= limits.chunks_served * (limits.leases * limits.readers_per_lease),
            "more chunks are being served than the limits allow");
  }
  const auto live = [](const auto& entry) { return entry.second.live; };
  require(stats.leases == static_cast<std::uint64_t>(std::count_if(leases.begin(), leases.end(), live)) &&
              stats.pulls == pulls.size(),
          "the agent and its owner do not count the same leases and pulls");
}

void Node::on_report(const Report& report) {
  world.note(report);
  if (report.kind == ReportKind::lease_released || report.kind == ReportKind::lease_ended) {
    LeaseBook& lease = leases.at(report.key);
    require(lease.live, "a lease ended twice");
    lease.live = lease.open = false;
    lease.released = report.kind == ReportKind::lease_released;
    memory->give_back(lease.blocks);
    const auto heard = heard_s_.find(report.key);
    const bool by_time = report.detail.starts_with("no sink");  // Sinks may give any cause for giving up.
    require(!by_time || heard == heard_s_.end() || world.now_s >= heard->second + options.lease_ttl_s - 1e-6,
            "a lease expired though its sink wanted it");
    std::erase_if(served_, [&](const auto& entry) { return world.key_of_life(entry.second.life) == report.key; });
    return;
  }
  const auto found = pulls.find(report.key);
  require(found != pulls.end(), "a report of a pull that has ended, or never began");
  if (report.kind == ReportKind::pull_progress) {
    require(report.layers == found->second.layers + 1, "layers were not reported one by one");
    found->second.layers = report.layers;
    return;
  }
  on_pull_end(report);
}

void Node::on_pull_end(const Report& report) {
  PullBook pull = std::move(pulls.at(report.key));
  pulls.erase(report.key);
  const auto writes_it = [&](const Place& chunk) {
    const auto known = keys_of_pulls_.find(chunk.pull);
    return known != keys_of_pulls_.end() && known->second == pull.key;
  };
  for (const auto& [id, end] : ends) {
    for (const Writing& writing : end->writing) {
      require(!writes_it(writing.chunk), "the end was reported while something still writes");
    }
  }
  for (const Action& action : actions_) {
    const auto* place = std::get_if<Place>(&action);
    require(place == nullptr || !writes_it(*place), "the end was reported before a write was carried out");
  }
  std::erase_if(keys_of_pulls_, [&](const auto& entry) { return entry.second == pull.key; });
  if (report.kind == ReportKind::pull_done) {
    require(report.layers == kLayers && pull.layers == kLayers, "a pull was done before all its layers were");
    require(pull.written >= pull.blocks.size() * kLayers, "success without all the bytes");
    require(report.bytes == pull.blocks.size() * kBlockBytes * kLayers, "a done pull counted other bytes than its own");
    if (!world.distrusts(number, pull.source)) check_content(pull);
  } else {
    require(report.cause != Cause::none, "a pull failed for no reason");
    require(report.detail != kLie || world.distrusts(number, pull.source),
            "another agent than its source ended a pull");
    require(report.cause != Cause::checksum || world.corrupts() || world.distrusts(number, pull.source),
            "a checksum failed though nothing was corrupted");
  }
  memory->give_back(pull.blocks);
}

void Node::check_content(const PullBook& pull) const {
  const std::uint32_t life = memory->cell(0, pull.blocks.front(), 0).life;
  require(life != 0 && world.key_of_life(life) == pull.key, "success with bytes of something else");
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    for (std::uint32_t i = 0; i < pull.blocks.size(); ++i) {
      const std::uint32_t position = pull.first_block + i;
      for (std::uint32_t token = 0; token < kBlockTokens; ++token) {
        if (position * kBlockTokens + token >= pull.tokens) continue;  // The rest of the last block was not requested.
        const Cell expected{life, static_cast<std::uint16_t>(position), static_cast<std::uint8_t>(layer),
                            static_cast<std::uint8_t>(token)};
        const Cell& got = memory->cell(layer, pull.blocks[i], token);
        require(got == expected, got.life == life ? "success with bytes of another place" : "success with wrong bytes");
      }
    }
  }
}

void Node::check_end(double now_s) const {
  for (const auto& [key, pull] : pulls) require(now_s <= pull.deadline_s, "a pull outlived its budget");
}

void Node::check_quiet() const {
  for (const auto& [id, end] : ends) {
    const bool lost = end->link->silent || end->peer.expired() || world.distrusts(number, end->peer_node);
    require(lost || std::ranges::count(end->slot_used, true) == 0, "a slot stays in use that holds no chunk");
  }
}

void Node::check_nothing_left() const {
  const Stats stats = core.stats();
  const auto none = [](std::uint64_t count, const char* what) {
    require(count == 0, std::to_string(count) + " " + what + " left when all was over");
  };
  none(stats.leases, "leases");
  none(stats.leased_blocks, "leased blocks");
  none(stats.pulls, "pulls");
  none(stats.parked, "parked asks");
  none(stats.readers, "readers");
  none(stats.peers, "peers");
  none(stats.connections, "connections");
  none(ends.size(), "ends of connections");
  none(stopping_.size(), "fences");
  none(kBlocks - memory->free(), "blocks");
}

}  // namespace baton::model
