// Ranks for the C++ tests and benchmarks: threads of this process, or processes forked from it.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "core/engine.h"
#include "core/error.h"
#include "core/sync.h"

namespace ringcomm::test {

#if defined(__SANITIZE_THREAD__)
inline constexpr bool kProcesses = false;  // ThreadSanitizer does not see across processes
#else
inline constexpr bool kProcesses = true;
#endif

inline std::atomic<long> cells{0};

inline void require(bool ok, const std::string& what) {
  cells.fetch_add(1);
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::fflush(nullptr);
  _exit(1);
}

using RankFunction = std::function<void(Engine&)>;

// The engine under test.
#if !defined(RINGCOMM_TEST_ENGINE)
#define RINGCOMM_TEST_ENGINE make_cpu_engine
#endif

// The stream of this rank, for engines that have streams. Tests look at results as soon as a call is over.
inline thread_local std::uintptr_t stream = 0;
inline int run(Engine& engine, Call call) {
  call.stream = stream;
  const int source = engine.run(call);
  engine.synchronize(stream);
  return source;
}
inline std::shared_ptr<Request> submit(Engine& engine, Call call) {
  call.stream = stream;
  return engine.submit(std::move(call));
}

inline EngineOptions short_timeout() {
  EngineOptions options;
  options.timeout_ms = 60000;
  return options;
}

// Connects the engines, each in a thread of its own, which then calls `function(rank)`.
inline void run_connected(const std::vector<std::unique_ptr<Engine>>& engines,
                          const std::function<void(int)>& function) {
  std::vector<std::string> handles;
  for (const auto& engine : engines) handles.push_back(engine->handle());
  std::vector<std::thread> threads;
  for (int r = 0; r < static_cast<int>(engines.size()); ++r)
    threads.emplace_back([&, r] {
      engines[r]->connect(handles);
      function(r);
    });
  for (auto& thread : threads) thread.join();
}

inline void run_threads(int world_size, const RankFunction& function, const EngineOptions& options = short_timeout()) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (int r = 0; r < world_size; ++r) engines.push_back(RINGCOMM_TEST_ENGINE(r, world_size, options));
  run_connected(engines, [&](int r) { function(*engines[r]); });
}

// Exchanges the handles through a page that the forked ranks share. Ends the program if a rank fails.
// `dies`: a rank that a signal may end; until the others have ended nobody waits for it.
inline void run_processes(int world_size, const RankFunction& function, const EngineOptions& options = short_timeout(),
                          int dies = -1) {
  struct Entry {
    Flag ready;
    char handle[8192];
  };
  auto* entries = static_cast<Entry*>(
      mmap(nullptr, sizeof(Entry) * world_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  std::vector<pid_t> children;
  for (int r = 0; r < world_size; ++r) {
    const pid_t child = fork();
    if (child != 0) {
      children.push_back(child);
      continue;
    }
    int status = 0;
    try {
      auto engine = RINGCOMM_TEST_ENGINE(r, world_size, options);
      std::strncpy(entries[r].handle, engine->handle().c_str(), sizeof entries[r].handle - 1);
      __atomic_store_n(&entries[r].ready, 1, __ATOMIC_RELEASE);
      std::vector<std::string> handles;
      for (int p = 0; p < world_size; ++p) {
        while (!__atomic_load_n(&entries[p].ready, __ATOMIC_ACQUIRE)) usleep(100);
        handles.push_back(entries[p].handle);
      }
      engine->connect(handles);
      function(*engine);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", r, error.what());
      status = 1;
    }
    std::fflush(nullptr);
    _exit(status);
  }
  bool failed = false;
  const auto reap = [&](int rank) {
    int status = 0;
    waitpid(children[rank], &status, 0);
    failed = failed || (rank == dies ? !WIFSIGNALED(status) : status != 0);
  };
  for (int r = 0; r < world_size; ++r)
    if (r != dies) reap(r);
  if (dies >= 0) reap(dies);
  munmap(entries, sizeof(Entry) * world_size);
  if (failed) {
    std::fprintf(stderr, "a rank failed\n");
    std::exit(1);
  }
}

}  // namespace ringcomm::test
