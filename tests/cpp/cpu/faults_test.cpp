// What the cpu engine does when the ranks do not agree, stay away, leave or fork: the others are told, and nothing
// hangs.
#include <csignal>

#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

void mismatch(Engine& engine) {
  Call call;
  call.op = Op::kAllReduce;
  call.dtype = DType::kFloat32;
  std::vector<float> data(100, 1.f);
  call.input = call.output = data.data();
  call.count = engine.rank() == 1 ? 99 : 100;
  try {
    engine.run(call);
    require(false, "a mismatch was not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kMismatch, error.what());
    require(std::string(error.what()).find("all_reduce #0: rank") == 0, error.what());
    require(std::string(error.what()).find("rank 1 passed 99 x float32") != std::string::npos, error.what());
  }
}

void other_root(Engine& engine) {
  int data = engine.rank();
  Call call;
  call.op = Op::kBroadcast;
  call.dtype = DType::kInt32;
  call.root = engine.rank();
  call.input = call.output = &data;
  call.count = 1;
  try {
    engine.run(call);
    engine.run(Call{});
    require(false, "different roots were not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kMismatch, error.what());
    require(std::string(error.what()).find("broadcast #0: rank 0 passed 1 x int32, root 0") == 0, error.what());
  }
}

void timeout(Engine& engine) {
  if (engine.rank() == 1) return;  // never calls
  Call call;
  try {
    engine.run(call);
    require(false, "a missing rank was not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kTimeout, error.what());
    require(std::string(error.what()).find("rank 1") != std::string::npos, error.what());
  }
}

// A rank whose engine goes away with a call in flight takes its peers along, at once.
void leaving(int world_size) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world_size; ++r) engines.push_back(make_cpu_engine(r, world_size, short_timeout()));
  run_connected(engines, [&](int r) {
    engines[r]->run(Call{});
    if (r == 0) {
      const auto request = engines[0]->submit(Call{});
      engines[0].reset();
      require(request->done(), "a request ends with its engine");
      return;
    }
    Call call;
    call.op = Op::kRecv;  // what rank 0 never sends
    call.root = 0;
    try {
      engines[r]->run(call);
      require(false, "a rank that left was not noticed");
    } catch (const Error& error) {
      require(error.code() == ErrorCode::kAborted, error.what());
    }
  });
}

// A call that has ended on one rank ends on all of them, whatever that one does next.
void ended_for_all(Engine& engine) {
  std::vector<float> data(engine.rank() + 1, 1.f);
  Call call;
  try {
    engine.run(call);
    call.op = Op::kAllReduce;
    call.dtype = DType::kFloat32;
    call.input = call.output = data.data();
    call.count = 1;
    engine.run(call);
  } catch (const Error& error) {
    require(false, error.what());
  }
  require(data[0] == static_cast<float>(engine.world_size()), "the sum of all");
  engine.abort("it has what it wanted", ErrorCode::kAborted);
}

void expect_error(ErrorCode code, const std::function<void()>& body, const char* what) {
  try {
    body();
  } catch (const Error& error) {
    return require(error.code() == code, concat(what, ": ", error.what()));
  }
  require(false, what);
}

// close() sends what is queued, and ends what can never come; a request outlives its engine.
void closing(int world_size) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world_size; ++r) engines.push_back(make_cpu_engine(r, world_size, short_timeout()));
  run_connected(engines, [&](int r) {
    std::vector<char> data(8 << 20, static_cast<char>(7)), other(8);
    Call call;
    call.op = r == 0 ? Op::kSend : Op::kRecv;
    call.root = 1 - r;
    call.input = call.output = data.data();
    call.count = data.size();
    if (r == 1) {
      std::fill(data.begin(), data.end(), 0);
      usleep(20000);
      engines[1]->run(call);
      for (char x : data) require(x == 7, "close() sends what is queued");
      return;
    }
    const auto sent = engines[0]->submit(call);
    call.op = Op::kRecv;
    call.tag = 9;
    call.output = other.data();
    call.count = other.size();
    const auto never = engines[0]->submit(call);
    engines[0]->close();
    engines[0].reset();
    sent->wait();
    expect_error(ErrorCode::kAborted, [&] { never->wait(); }, "a receive ends with its engine");
  });
}

void other_parts(Engine& engine) {
  std::vector<int> a(3, 1), b(3, 1), out(3);
  Call call;
  call.op = Op::kReduceScatter;
  call.dtype = DType::kInt32;
  const std::size_t first = engine.rank() == 0 ? 3 : 1;
  call.input_parts = {{a.data(), first}, {b.data(), 4 - first}};
  call.output = out.data();
  call.count = engine.rank() == 0 ? first : 4 - first;
  try {
    engine.run(call);
    require(false, "parts that differ were not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kMismatch, error.what());
  }
}

// After the death of a rank the others meet, agree on who is left, and swap what they bring; one that has stopped is
// waited for, and left out.
void survivors(Engine& engine) {
  constexpr int kDies = 0, kStops = 3;
  Call call;
  engine.run(call);
  if (engine.rank() == kDies) kill(getpid(), SIGKILL);
  try {
    engine.run(call);
    require(false, "a death was not noticed");
  } catch (const Error& error) {
    require(error.code() == ErrorCode::kRankLost, error.what());
    require(std::string(error.what()).find("rank 0 (process") != std::string::npos, error.what());
  }
  if (engine.rank() == kStops) {
    usleep(5000000);
    return expect_error(
        ErrorCode::kRankLost, [&] { engine.agree_on_shrink("late", {}, 300); }, "one that comes late is left out");
  }
  const auto came = engine.agree_on_shrink("first", {}, 1500);
  std::vector<int> members;
  for (int r = 0; r < engine.world_size(); ++r)
    if (!came[r].empty()) members.push_back(r);
  require(members == std::vector<int>({1, 2, 4}), "who is left");
  const auto payloads = engine.agree_on_shrink(concat("of ", engine.rank()), members, 5000);
  for (int r = 0; r < engine.world_size(); ++r)
    require(payloads[r] == (came[r].empty() ? "" : concat("of ", r)), "what the others bring");
}

// A child forked from a rank is refused, and ends without disturbing anyone.
void forked_child(Engine& engine) {
  Call call;
  auto* shared = static_cast<int*>(engine.allocate(1 << 20));
  shared[5] = 7;
  engine.submit(call)->wait();  // the progress thread runs
  const pid_t child = fork();
  if (child == 0) {
    int status = 1;
    try {
      engine.run(call);
    } catch (const Error& error) {
      status = error.code() == ErrorCode::kInvalid ? 0 : 2;
    }
    engine.release(shared);
    engine.abort("a child has no say");
    engine.~Engine();
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  require(status == 0, "a forked child is refused");
  require(shared[5] == 7, "a forked child leaves the memory as it is");
  engine.run(call);
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  using namespace ringcomm::test;
  alarm(120);  // a hang ends the program
  run_threads(3, mismatch);
  run_threads(2, other_root);
  ringcomm::EngineOptions soon = short_timeout();
  soon.timeout_ms = 300;
  run_threads(3, timeout, soon);
  leaving(3);
  for (int round = 0; round < 200; ++round) run_threads(5, ended_for_all);
  closing(2);
  run_threads(2, other_parts);
  if (kProcesses) run_processes(2, forked_child);
  if (kProcesses) run_processes(5, survivors, short_timeout(), 0);
  std::printf("cpu_faults_test passed\n");
}
