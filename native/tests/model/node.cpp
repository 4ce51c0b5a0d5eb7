#include "tests/model/node.h"

#include <algorithm>
#include <cmath>

#include "tests/model/world.h"
#include "transfer/endpoint.h"

namespace baton::model {
namespace {

constexpr std::size_t kReadingAtOnce = 2;

}  // namespace

Node::Node(World& in, std::uint32_t as, Options with)
    : world(in),
      number(as),
      options(std::move(with)),
      endpoint(format_endpoint({{{"10.0.0.1:" + std::to_string(1000 + as)}}, options.incarnation})),
      core(options) {
  core.set_geometry({"model", kLayers, kBlocks, kBlockBytes, kBlockTokens});
}

// ---------------------------------------------------------------- steps of the core, checked

void Node::step(std::span<const Event> events) {
  for (const Event& event : events) hear(event);
  std::vector<Key> over;
  for (Action& action : core.step(world.now_s, events)) {
    if (const auto* report = std::get_if<Report>(&action)) {
      on_report(*report);
      if (report->kind >= ReportKind::lease_released) over.push_back(report->key);
    } else {
      check_action(action);
      actions_.push_back(std::move(action));
    }
  }
  for (const Event& event : events) {
    const auto* closed = std::get_if<Closed>(&event);
    if (closed == nullptr) continue;
    forget(closed->connection);
    known_.erase(closed->connection);
    closing_.erase(closed->connection);
  }
  // A parked ask is forgotten without a word when its sink is silent.
  std::erase_if(asks_, [&](const auto& entry) {
    const auto book = leases.find(entry.second.ask.key);
    const bool parked =
        book == leases.end() || (!book->second.live && std::count(over.begin(), over.end(), book->first) == 0);
    return parked && world.now_s >= entry.second.heard_s + options.lease_ttl_s;
  });
  for (const Key& key : over) check_told(key, "a lease's end was not told to a sink");
  for (const auto& [id, asked] : asks_) {
    const auto book = leases.find(asked.ask.key);
    require(book == leases.end() || !book->second.open || !book->second.completed ||
                asked.ask.tokens <= book->second.tokens,
            "a sink waits for more than there will be");
  }
  require(core.wake_s() > world.now_s, "the core wants to be woken at once, again and again");
  check_limits();
}

void Node::tick() {
  if (world.now_s >= core.wake_s()) step({});
}

void Node::check_action(const Action& action) {
  if (const auto* serve = std::get_if<Serve>(&action)) check_serve(*serve);
  if (const auto* place = std::get_if<Place>(&action)) check_place(*place);
  if (const auto* send = std::get_if<Send>(&action)) check_send(*send);
  if (const auto* close = std::get_if<Close>(&action)) {
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
    // A sink whose connection died asks again, to be told here.
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
                  [&](const auto& entry) { return entry.second.ask.key == release->key; });  // Those were parked.
  }
}

void Node::forget(ConnectionId connection) {
  std::erase_if(asks_, [&](const auto& entry) { return entry.first.first == connection; });
  std::erase_if(served_, [&](const auto& entry) { return entry.first.first.first == connection; });
}

void Node::check_told(const Key& key, const char* what) const {
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
    told_.insert({send.connection, decode<frames::Revoked>(body)->pull});
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
    require(report.cause != Cause::expired || heard == heard_s_.end() ||
                world.now_s >= heard->second + options.lease_ttl_s - 1e-6,
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
        if (position * kBlockTokens + token >= pull.tokens) continue;  // Nobody asked for the rest of the last block.
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

// ---------------------------------------------------------------- the owner

bool Node::command(const Event& event) {
  try {
    step({&event, 1});
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

bool Node::open(const Key& key, std::uint32_t tokens, double unclaimed_ttl_s) {
  LeaseBook& lease = leases[key];
  if (lease.open) return false;
  const LeaseBook before = lease;
  lease.key = key;
  lease.tokens = tokens;
  lease.live = lease.open = true;
  lease.completed = false;
  lease.ready = {};
  lease.life = world.begin_life(key);
  heard_s_.erase(key);
  if (!command(OpenLease{key, unclaimed_ttl_s})) {
    lease = before;
    return false;
  }
  lease.generation = core.generation(key);
  return lease.open;
}

void Node::extend(LeaseBook& lease, std::uint32_t count, Random& random) {
  auto blocks = memory->take(count, Use::lease, lease.key, random);
  if (!blocks) return;
  lease.blocks.insert(lease.blocks.end(), blocks->begin(), blocks->end());
  require(command(ExtendLease{lease.key, lease.generation, *blocks}), "an extension was refused");
}

// A layer is computed up to some token, as prefill does it chunk by chunk; then it says so.
void Node::compute(LeaseBook& lease, Random& random) {
  const auto room = static_cast<std::uint32_t>(lease.blocks.size()) * kBlockTokens;
  const auto begin = std::min_element(lease.ready.begin(), lease.ready.end());
  const std::uint32_t most = std::min(room, lease.tokens);
  if (*begin >= most) return;
  const std::uint32_t tokens = *begin + 1 + random.below(most - *begin);
  const bool all = random.chance(0.3);
  for (std::uint32_t layer = 0; layer < kLayers; ++layer) {
    if (!all && layer != begin - lease.ready.begin()) continue;
    for (std::uint32_t token = lease.ready[layer]; token < tokens; ++token) {
      const std::uint32_t position = token / kBlockTokens;
      memory->cell(layer, lease.blocks[position], token % kBlockTokens) = {
          lease.life, static_cast<std::uint16_t>(position), static_cast<std::uint8_t>(layer),
          static_cast<std::uint8_t>(token % kBlockTokens)};
    }
  }
  const auto layer = static_cast<std::int32_t>(begin - lease.ready.begin());
  for (std::uint32_t i = 0; i < kLayers; ++i) {
    if (all || i == static_cast<std::uint32_t>(layer)) lease.ready[i] = std::max(lease.ready[i], tokens);
  }
  require(command(PostReady{lease.key, lease.generation, all ? -1 : layer, tokens}), "a watermark was refused");
}

void Node::complete(LeaseBook& lease, std::uint32_t tokens) {
  lease.completed = true;
  lease.completed = command(CompleteLease{lease.key, lease.generation, tokens});
}

// As preemption does: the blocks are somebody else's as soon as the call returns.
void Node::revoke(LeaseBook& lease) {
  lease.open = false;
  memory->give_back(lease.blocks);
  told_.clear();
  require(command(RevokeLease{lease.key, false}), "a revocation was refused");
  for (const auto& [id, asked] : asks_) {
    const bool is_told = asked.ask.key != lease.key || asked.ask.data_only || told_.contains(id);
    require(is_told, "a revocation was not told to a sink");
  }
  // Chunks that were not begun are forgotten, and may be asked for again.
  std::erase_if(served_, [&](const auto& entry) { return world.key_of_life(entry.second.life) == lease.key; });
}

bool Node::pull(PullBook book, const std::string& of, double budget_s, Random& random) {
  const std::uint32_t last = (book.tokens + kBlockTokens - 1) / kBlockTokens;
  auto blocks = memory->take(last - book.first_block, Use::pull, book.key, random);
  if (!blocks) return false;
  book.blocks = *blocks;
  book.deadline_s = world.now_s + budget_s;
  const Key key = book.key;
  const StartPull start{key, of, book.first_block * kBlockTokens, book.tokens, *blocks, budget_s};
  pulls[key] = std::move(book);
  if (command(start)) return true;
  memory->give_back(pulls.at(key).blocks);
  pulls.erase(key);
  return false;
}

// ---------------------------------------------------------------- the shell

std::shared_ptr<End> Node::find(ConnectionId id) const {
  const auto found = ends.find(id);
  return found == ends.end() ? nullptr : found->second;
}

template <class Act>
bool Node::any_end(Random& random, const Act& act) {
  if (ends.empty()) return false;
  auto at = std::next(ends.begin(), random.below(ends.size()));
  for (std::size_t tried = 0; tried < ends.size(); ++tried, ++at) {
    if (at == ends.end()) at = ends.begin();
    const std::shared_ptr<End> end = at->second;  // It may go away by what it does.
    if (act(end)) return true;
  }
  return false;
}

bool Node::take_events(Random& random) {
  if (happened_.empty()) return false;
  const std::size_t count = 1 + random.below(happened_.size());
  std::vector<Event> events;
  for (std::size_t i = 0; i < count; ++i) {
    events.push_back(std::move(happened_.front()));
    happened_.pop_front();
    if (const auto* stopped = std::get_if<PlacingStopped>(&events.back())) stopping_.erase(stopped->pull);
  }
  step(events);
  return true;
}

std::shared_ptr<End> Node::connect(std::uint32_t peer_node, ConnectionId id) {
  auto end = std::make_shared<End>();
  end->node = number;
  end->peer_node = peer_node;
  end->id = id;
  return ends[id] = end;
}

// The other side learns of it by a farewell in its turn, or never.
void Node::drop(const std::shared_ptr<End>& end, const std::string& why, bool farewell) {
  if (ends.erase(end->id) == 0) return;
  happened(Closed{end->id, why});
  const auto peer = end->peer.lock();
  if (peer == nullptr || end->link->silent) return;
  if (!farewell) peer->arriving.clear();
  peer->arriving.push_back(Farewell{});
}

bool Node::carry_out_one(Random& random) {
  if (actions_.empty()) return false;
  const Action action = std::move(actions_.front());
  actions_.pop_front();
  if (const auto* connecting = std::get_if<Connect>(&action)) {
    world.connect(*this, *connecting, random);
    return true;
  }
  if (const auto* stop = std::get_if<StopPlacing>(&action)) {
    stops_.push_back(stop->pull);
    return true;
  }
  const auto end = std::visit(
      [&]<class A>(const A& a) -> std::shared_ptr<End> {
        if constexpr (requires { a.connection; }) return find(a.connection);
        return nullptr;
      },
      action);
  if (end == nullptr) return true;
  if (std::holds_alternative<Close>(action)) {
    drop(end, "closed here", random.chance(0.5));
  } else if (const auto* send = std::get_if<Send>(&action)) {
    const Blob frame(send->frame.begin() + kLengthBytes, send->frame.end());
    const auto peer = end->peer.lock();
    if (end->is_inline() && !end->reading.empty()) {
      end->held.push_back(frame);
    } else if (peer != nullptr && !end->link->silent) {
      peer->arriving.push_back(frame);
    }
  } else if (const auto* serve = std::get_if<Serve>(&action)) {
    end->serving.push_back(*serve);
  } else if (const auto* stop = std::get_if<StopServing>(&action)) {
    std::erase_if(end->serving, [&](const Serve& chunk) { return chunk.pull == stop->pull; });
  } else if (const auto* credit = std::get_if<Credit>(&action)) {
    const auto slot = static_cast<std::size_t>(credit->slot);
    const bool used = end->has_slots() && slot < kSlots && end->slot_used[slot];
    require(used || world.distrusts(number, end->peer_node), "a slot was credited that is not in use");
    if (!used) {
      drop(end, "an impossible credit", true);
    } else {
      end->slot_used[slot] = false;
    }
  } else if (const auto* chunk = std::get_if<Place>(&action)) {
    place(end, *chunk);
  } else if (std::holds_alternative<Discard>(action)) {
    require(end->announced != nullptr, "a payload was thrown away that nobody announced");
    end->discarding = true;
  } else if (const auto* use = std::get_if<UseBackend>(&action)) {
    end->backend = use->backend;
    end->checksum = use->checksum;
  } else if (const auto* offer = std::get_if<OfferBackend>(&action)) {
    const bool ok = world.works(offer->backend);
    happened(BackendOffered{end->id, ok, ok ? Blob{1, 2, 3} : Blob{}, ok ? "" : "not here"});
  } else if (const auto* accept = std::get_if<AcceptBackend>(&action)) {
    happened(BackendAccepted{end->id, accept->offer == Blob{1, 2, 3}, Blob{4, 5, 6}, "a strange offer"});
  } else if (const auto* check = std::get_if<CheckBackend>(&action)) {
    happened(BackendChecked{end->id, check->proof == Blob{4, 5, 6}});
  }
  return true;
}

void Node::place(const std::shared_ptr<End>& end, const Place& chunk) {
  Writing writing{.chunk = chunk};
  const std::size_t cells = chunk.blocks.size() * kBlockTokens;
  bool possible = true;
  if (chunk.slot >= 0) {
    possible = end->has_slots() && chunk.slot < static_cast<std::int32_t>(kSlots) &&
               end->link->ring[static_cast<std::size_t>(chunk.slot)].size() == cells;
  } else if (end->is_inline()) {
    require(end->announced != nullptr && !end->discarding && end->announced->pull == chunk.pull &&
                end->announced->sequence == chunk.sequence,
            "an inline payload was placed that is not the one announced");
    require(end->announced->said_bytes == cells * sizeof(Cell), "a payload was placed into blocks of another size");
    possible = end->announced->total == cells;  // Else the header lied, and what follows it is no payload.
    writing.transit = end->announced;
  } else {
    possible = chunk.where.size() == chunk.blocks.size();
    for (const std::uint8_t block : chunk.where) {
      writing.remote.push_back(block);
      possible = possible && block < kBlocks;
    }
  }
  require(possible || world.distrusts(number, end->peer_node), "a chunk was placed that cannot be");
  const auto same = [&](const Writing& other) {
    return other.chunk.pull == chunk.pull && other.chunk.sequence == chunk.sequence;
  };
  require(std::ranges::none_of(end->writing, same), "a chunk is written twice at a time");
  if (!possible) return drop(end, "an impossible chunk", true);
  end->writing.push_back(std::move(writing));
}

bool Node::deliver(Random& random) {
  return any_end(random, [&](const std::shared_ptr<End>& end) {
    if (end->announced != nullptr && end->discarding && end->announced->whole()) {
      end->announced = nullptr;
      end->discarding = false;
      return true;
    }
    if (end->arriving.empty() || end->link->silent) return false;
    // What is behind a payload waits for it, unless it was cut short.
    const bool cut_short = end->announced != nullptr && !end->announced->whole() &&
                           std::holds_alternative<Farewell>(end->arriving.front());
    if (end->announced != nullptr && !cut_short) return false;
    if (end->lie != 0) world.lie_about_chunk(*end);
    const Message message = std::move(end->arriving.front());
    end->arriving.pop_front();
    if (const auto* frame = std::get_if<Blob>(&message)) {
      happened(FrameArrived{end->id, *frame});
    } else if (const auto* transit = std::get_if<std::shared_ptr<Transit>>(&message)) {
      end->announced = *transit;
      happened(DataArrived{end->id, (*transit)->pull, (*transit)->sequence, (*transit)->said_bytes});
    } else {
      drop(end, "closed there", true);
    }
    return true;
  });
}

bool Node::begin_reading(End& end, Random& random) {
  if (end.serving.empty() || end.reading.size() >= (end.is_inline() ? 1 : kReadingAtOnce)) return false;
  Reading reading{.chunk = end.serving.front()};
  if (end.has_slots()) {
    std::vector<std::int32_t> free;
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
      if (!end.slot_used[slot]) free.push_back(static_cast<std::int32_t>(slot));
    }
    if (free.empty()) return false;
    reading.slot = random.pick(free);
    end.slot_used[static_cast<std::size_t>(reading.slot)] = true;
  }
  end.serving.pop_front();
  const std::size_t total = reading.chunk.blocks.size() * kBlockTokens;
  reading.transit =
      std::make_shared<Transit>(Transit{reading.chunk.pull, reading.chunk.sequence, total * sizeof(Cell), total, {}});
  if (const auto peer = end.peer.lock(); end.is_inline() && peer != nullptr && !end.link->silent) {
    peer->arriving.push_back(reading.transit);
  }
  end.reading.push_back(std::move(reading));
  return true;
}

bool Node::read(Random& random) {
  return any_end(random, [&](const std::shared_ptr<End>& end) {
    if (end->backend.empty()) return false;
    if (random.chance(0.5) && begin_reading(*end, random)) return true;
    if (end->reading.empty()) return begin_reading(*end, random);
    const std::size_t index = random.below(end->reading.size());
    Reading& reading = end->reading[index];
    for (std::uint32_t i = 1 + random.below(6); i > 0 && !reading.transit->whole(); --i) {
      const std::size_t at = reading.transit->cells.size();
      Cell cell = memory->cell(reading.chunk.layer, reading.chunk.blocks[at / kBlockTokens], at % kBlockTokens);
      reading.crc = sum(reading.crc, cell);
      if (reading.chunk.corrupt && at == 0 && (end->is_inline() || end->has_slots())) cell.life ^= 1u << 31;
      reading.transit->cells.push_back(cell);
    }
    if (reading.transit->whole()) finish_reading(*end, index);
    return true;
  });
}

void Node::finish_reading(End& end, std::size_t index) {
  Reading reading = std::move(end.reading[index]);
  end.reading.erase(end.reading.begin() + static_cast<std::ptrdiff_t>(index));
  const Serve& chunk = reading.chunk;
  const std::uint32_t crc = end.checksum ? reading.crc : 0;
  if (end.is_inline() || end.has_slots()) {
    if (end.has_slots()) end.link->ring[static_cast<std::size_t>(reading.slot)] = reading.transit->cells;
    happened(Served{end.id, chunk.pull, chunk.sequence, reading.slot, crc});
  } else {
    Blob where(chunk.blocks.begin(), chunk.blocks.end());
    happened(Granted{end.id, chunk.pull, chunk.sequence, chunk.corrupt ? crc ^ 1 : crc, std::move(where)});
  }
  const auto peer = end.peer.lock();
  for (Blob& frame : end.held) {
    if (peer != nullptr && !end.link->silent) peer->arriving.push_back(std::move(frame));
  }
  end.held.clear();
}

bool Node::write(Random& random) {
  return any_end(random, [&](const std::shared_ptr<End>& end) {
    if (end->writing.empty()) return false;
    const std::size_t index = random.below(end->writing.size());
    Writing& writing = end->writing[index];
    const Place& chunk = writing.chunk;
    const std::size_t total = chunk.blocks.size() * kBlockTokens;
    const std::size_t before = writing.written;
    for (std::uint32_t i = 1 + random.below(6); i > 0 && writing.written < total; --i) {
      const std::size_t at = writing.written;
      const std::uint32_t block = chunk.blocks[at / kBlockTokens];
      if (writing.transit != nullptr && at >= writing.transit->cells.size()) break;
      if (chunk.slot >= 0 && at >= end->link->ring[static_cast<std::size_t>(chunk.slot)].size()) {
        require(world.distrusts(number, end->peer_node), "a slot was filled again while it was being read");
        drop(end, "an impossible slot", true);
        return true;
      }
      const Cell& cell = writing.transit != nullptr ? writing.transit->cells[at]
                         : chunk.slot >= 0
                             ? end->link->ring[static_cast<std::size_t>(chunk.slot)].at(at)
                             : end->remote->cell(chunk.layer, writing.remote[at / kBlockTokens], at % kBlockTokens);
      const auto owner = keys_of_pulls_.find(chunk.pull);
      require(
          owner != keys_of_pulls_.end() && memory->at(block).use == Use::pull && memory->at(block).key == owner->second,
          "a write into a block that was given back");
      memory->cell(chunk.layer, block, at % kBlockTokens) = cell;
      ++writing.written;
    }
    const bool progressed = writing.written != before;
    if (writing.written == total) finish_writing(*end, index);
    return progressed;
  });
}

void Node::finish_writing(End& end, std::size_t index) {
  const Writing writing = std::move(end.writing[index]);
  end.writing.erase(end.writing.begin() + static_cast<std::ptrdiff_t>(index));
  const Place& chunk = writing.chunk;
  std::uint32_t crc = 0;
  for (const std::uint32_t block : chunk.blocks) {
    for (std::size_t token = 0; token < kBlockTokens; ++token) crc = sum(crc, memory->cell(chunk.layer, block, token));
  }
  if (writing.transit != nullptr) end.announced = nullptr;
  pulls.at(keys_of_pulls_.at(chunk.pull)).written += chunk.blocks.size();
  happened(Placed{end.id, chunk.pull, chunk.sequence, chunk.slot, end.checksum ? crc : 0});
}

// A fence may take its time: until it is up, writes that were begun go on.
bool Node::stop_writing(Random& random) {
  if (stops_.empty()) return false;
  const std::size_t index = random.below(stops_.size());
  const PullId pull = stops_[index];
  stops_.erase(stops_.begin() + static_cast<std::ptrdiff_t>(index));
  for (const auto& [id, end] : ends) {
    std::erase_if(end->writing, [&](const Writing& writing) {
      if (writing.chunk.pull != pull) return false;
      if (writing.transit != nullptr) {
        end->discarding = true;
      } else {
        happened(Placed{end->id, pull, writing.chunk.sequence, writing.chunk.slot, 0});
      }
      return true;
    });
  }
  happened(PlacingStopped{pull});
  return true;
}

}  // namespace baton::model
