// The shell of an agent, one step at a time: executes actions, delivers frames, reads and writes chunks.
#include <algorithm>

#include "tests/model/world.h"

namespace baton::model {
namespace {

constexpr std::size_t kReadingAtOnce = 2;

}  // namespace

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
    require(end->announced != nullptr, "a payload was discarded that was not announced");
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
    possible = end->announced->total == cells;  // If not, the header lied, and no payload follows it.
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
    // Frames behind a payload wait for it, unless it was cut short.
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
    if (end->backend.empty() || end->stalls) return false;
    if (random.chance(0.5) && begin_reading(*end, random)) return true;
    if (end->reading.empty()) return begin_reading(*end, random);
    const std::size_t index = random.below(end->reading.size());
    Reading& reading = end->reading[index];
    for (std::uint32_t i = 1 + random.below(6); i > 0 && !reading.transit->whole(); --i) {
      const std::size_t at = reading.transit->cells.size();
      Cell cell = memory->cell(reading.chunk.layer, reading.chunk.blocks[at / kBlockTokens], at % kBlockTokens);
      reading.crc = sum(reading.crc, cell);
      if (reading.chunk.corruption != Corruption::none && at == 0 && (end->is_inline() || end->has_slots())) {
        cell.life ^= 1u << 31;
      }
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
    happened(
        Granted{end.id, chunk.pull, chunk.sequence, crc ^ (chunk.corruption != Corruption::none), std::move(where)});
  }
  const auto peer = end.peer.lock();
  for (Blob& frame : end.held) {
    if (peer != nullptr && !end.link->silent) peer->arriving.push_back(std::move(frame));
  }
  end.held.clear();
}

bool Node::write(Random& random) {
  return any_end(random, [&](const std::shared_ptr<End>& end) {
    if (end->writing.empty() || end->stalls) return false;
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
