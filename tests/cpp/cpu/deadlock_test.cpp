// Ranks that wait for each other in several communicators are told; ranks that come late never are.
#include <chrono>
#include <random>

#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

// The engines of all communicators, by communicator and by place in it.
struct World {
  explicit World(std::vector<std::vector<int>> groups) : members(std::move(groups)) {
    for (const auto& group : members) {
      engines.emplace_back();
      handles.emplace_back();
      for (std::size_t place = 0; place < group.size(); ++place) {
        const int world_size = static_cast<int>(group.size());
        engines.back().push_back(make_cpu_engine(static_cast<int>(place), world_size, short_timeout()));
        handles.back().push_back(engines.back().back()->handle());
      }
    }
  }
  // The engine of a rank in a communicator; null: it is not in it.
  Engine* engine(int group, int rank) const {
    for (std::size_t place = 0; place < members[group].size(); ++place)
      if (members[group][place] == rank) return engines[group][place].get();
    return nullptr;
  }
  // Runs a function on every rank, a thread each.
  void run(int world_size, const std::function<void(int)>& function) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size; ++rank)
      threads.emplace_back([&, rank] {
        for (std::size_t group = 0; group < members.size(); ++group)
          if (Engine* const mine = engine(static_cast<int>(group), rank)) mine->connect(handles[group]);
        function(rank);
      });
    for (auto& thread : threads) thread.join();
  }

  std::vector<std::vector<int>> members;
  std::vector<std::vector<std::unique_ptr<Engine>>> engines;
  std::vector<std::vector<std::string>> handles;
};

void expect_deadlock(const std::function<void()>& call, const char* word) {
  try {
    call();
    require(false, "a deadlock was not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kMismatch, error.what());
    require(std::string(error.what()).find(word) != std::string::npos, error.what());
    require(std::string(error.what()).find("in the same order on every rank") != std::string::npos, error.what());
  }
}

// Rank 0 in one communicator, the others in another one; `async`: another thread of rank 0 makes its call.
void crossed(bool async) {
  World world({{0, 1, 2}, {0, 1, 2}});
  world.run(3, [&](int rank) {
    Engine& engine = *world.engine(rank == 0 ? 0 : 1, rank);
    const auto call = [&] { async&& rank == 0 ? engine.submit(Call{})->wait() : void(engine.run(Call{})); };
    expect_deadlock(call, "but it waits in barrier #0 of another communicator for rank");
  });
}

// Rank r waits for the next one in a communicator of the two.
void circle(int world_size) {
  std::vector<std::vector<int>> groups{{}};
  for (int rank = 0; rank < world_size; ++rank) groups[0].push_back(rank);
  for (int rank = 0; rank < world_size; ++rank) groups.push_back({rank, (rank + 1) % world_size});
  World world(groups);
  world.run(world_size, [&](int rank) {
    Engine& engine = *world.engine(rank + 1, rank);
    expect_deadlock([&] { engine.run(Call{}); }, "which waits in barrier #0 of another communicator");
  });
}

// Two threads of each rank, each in a communicator of its own; the peers' threads come in the other order, and late.
void two_threads() {
  World world({{0, 1}, {0, 1}});
  world.run(2, [&](int rank) {
    std::thread helper([&] {
      if (rank == 0) usleep(80000);
      for (int i = 0; i < 20; ++i) world.engine(1, rank)->run(Call{});
    });
    if (rank == 1) usleep(80000);
    for (int i = 0; i < 20; ++i) world.engine(0, rank)->run(Call{});
    helper.join();
  });
}

// Rank 0's main thread waits for rank 1, which waits for a call that rank 0 has queued behind one for which rank 2 is
// late. `limit_ms`: of that one; a short one is not told to the others.
void queued_behind(std::int64_t limit_ms) {
  World world({{0, 1, 2}, {0, 1, 2}});
  world.run(3, [&](int rank) {
    Engine& engine = *world.engine(0, rank);
    if (rank == 2) usleep(100000);
    float data[3] = {};
    Call gather;
    gather.op = Op::kGather;
    gather.dtype = DType::kFloat32;
    gather.count = 1;
    gather.input = gather.output = data;
    gather.timeout_ms = limit_ms;
    const auto first = engine.submit(gather), second = engine.submit(Call{});
    if (rank != 0) first->wait(), second->wait();
    world.engine(1, rank)->run(Call{});
    first->wait(), second->wait();
  });
}

// The same calls of several communicators on all ranks, which take their time; some are waited for later.
void legal(unsigned seed, int world_size, int calls) {
  std::mt19937 plan(seed);
  std::vector<std::vector<int>> groups{{}};
  for (int rank = 0; rank < world_size; ++rank) groups[0].push_back(rank);
  for (int i = 0; i < 4; ++i) {
    std::vector<int> members = groups[0];
    std::shuffle(members.begin(), members.end(), plan);
    members.resize(2 + plan() % (world_size - 1));
    groups.push_back(members);
  }
  struct Step {
    std::size_t group, kind;
  };
  std::vector<Step> steps;
  for (int i = 0; i < calls; ++i) steps.push_back({plan() % groups.size(), plan() % 4});
  World world(groups);
  world.run(world_size, [&](int rank) {
    std::mt19937 mine(seed * 100 + rank);
    std::vector<std::shared_ptr<Request>> open;
    for (const Step& step : steps) {
      if (mine() % 4 == 0) usleep(mine() % 20000);
      Engine* const engine = world.engine(static_cast<int>(step.group), rank);
      if (!engine) continue;
      Call call;
      if (step.kind == 0) {
        open.push_back(engine->submit(call));
      } else if (step.kind == 1 && engine->rank() < 2) {
        std::vector<char> data(1 << 20);
        call.op = engine->rank() == 0 ? Op::kSend : Op::kRecv;
        call.root = 1 - engine->rank();
        call.input = call.output = data.data();
        call.count = data.size();
        engine->run(call);
      } else if (step.kind > 1) {
        engine->run(call);
      }
      if (!open.empty() && mine() % 3 == 0) {
        open.front()->wait();
        open.erase(open.begin());
      }
    }
    for (const auto& request : open) request->wait();
  });
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  const bool quick = argc > 1 && std::string(argv[1]) == "quick";
  alarm(200);                              // a hang ends the program
  setenv("RINGCOMM_DEADLOCK_MS", "2", 1);  // so that most waits are long ones
  for (int round = 0; round < 20; ++round) {
    crossed(round % 2 == 1);
    circle(3 + round % 3);
    two_threads();
    queued_behind(round % 2 == 0 ? 5000 : 60000);
  }
  for (unsigned seed = 0; seed < (quick ? 8u : 40u); ++seed) legal(seed, 2 + seed % 4, 150);
  std::printf("cpu_deadlock_test passed\n");
}
