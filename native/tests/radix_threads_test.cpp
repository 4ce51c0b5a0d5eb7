// Readers beside writers: every answer is one that the index could have given, and no reader waits for a whole call.
#include <atomic>
#include <chrono>
#include <thread>

#include "radix/tree.h"
#include "tests/check.h"
#include "tests/radix_world.h"

using namespace baton::tests;

TEST(readers_see_whole_batches_while_writers_change_the_tree) {
  constexpr std::uint32_t kWriters = 2;
  std::mt19937_64 random(7);
  const std::vector<Prompt> prompts = make_prompts(random, 12, 3000);
  // Worker 0 holds everything throughout; the writers' workers come and go beside it.
  Index<Tree> index;
  std::size_t fresh = 0;
  for (const Prompt& prompt : prompts)
    CHECK(index.store({0, Tier::active}, std::nullopt, view(prompt), fresh) == Status::ok);

  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  std::atomic<long> matches{0};
  const auto read = [&](std::uint64_t seed) {
    std::mt19937_64 mine(seed);
    Leading leading;
    std::vector<Held> held;
    while (!stop.load()) {
      const Prompt& prompt = prompts[mine() % prompts.size()];
      index.match(view(prompt), leading, held);
      const bool has_first = !held.empty() && held[0].worker == 0 && held[0].reach.front() == prompt.size();
      const bool in_range = std::all_of(held.begin(), held.end(), [&](const Held& each) {
        return each.worker <= kWriters && std::is_sorted(each.reach.begin(), each.reach.end()) &&
               each.reach.back() <= prompt.size();
      });
      if (!has_first || !in_range) ++wrong;
      ++matches;
    }
  };
  const auto write = [&](std::uint32_t worker) {
    std::mt19937_64 mine(worker);
    for (int step = 0; step < 150; ++step) {
      const Prompt& prompt = prompts[mine() % prompts.size()];
      const Holder holder{worker, kAllTiers[mine() % kTiers]};
      std::size_t new_blocks = 0;
      switch (mine() % 6) {
        case 0:
          index.clear(worker);
          break;
        case 1: {
          const std::vector<Run> runs = index.dump({0, Tier::active});
          std::vector<Index<Tree>::Part> parts;
          for (const Run& run : runs) parts.push_back({run.parent, view(run.blocks)});
          index.load(holder, parts);
          break;
        }
        case 2:
          index.remove(holder, view(prompt, prompt.size() / 2, prompt.size() - prompt.size() / 2));
          break;
        default: {
          // Blocks of its own behind the shared ones, so that nodes, sets and chunks come and go.
          Prompt own = prompt;
          for (int more = 0; more < 700; ++more) own.push_back({mine(), mine()});
          index.store(holder, std::nullopt, view(own), new_blocks);
          index.tick();
          index.idle(3, 1000);
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t reader = 0; reader < 2; ++reader) threads.emplace_back(read, 40 + reader);
  std::vector<std::thread> writers;
  for (std::uint32_t worker = 1; worker <= kWriters; ++worker) writers.emplace_back(write, worker);
  for (std::thread& writer : writers) writer.join();
  stop = true;
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(matches > 0);
  for (std::uint32_t worker = 0; worker <= kWriters; ++worker) index.clear(worker);
  const Size size = index.size();
  CHECK(size.blocks == 0 && size.ghosts == 0 && size.nodes == 0 && size.sets == 0);
}

TEST(a_reader_gets_in_between_two_batches) {
  // A writer that never pauses between its batches, and a batch that lasts: each read must come within two of them.
  BatchLock lock;
  std::atomic<long> batches{0};
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    while (!stop.load()) {
      lock.lock();
      ++batches;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      lock.unlock();
    }
  });
  long waited_max = 0;
  for (int read = 0; read < 50; ++read) {
    const long before = batches.load();
    lock.lock_shared();
    waited_max = std::max(waited_max, batches.load() - before);
    lock.unlock_shared();
  }
  stop = true;
  writer.join();
  CHECK(waited_max <= 1);
}
