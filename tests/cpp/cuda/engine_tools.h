// Tools of the tests of the cuda engine: ranks, streams, errors, and sections that run in processes of their own, since
// an emulated GPU does not survive a fork.
#pragma once

#define RINGCOMM_TEST_ENGINE make_cuda_engine
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>

#include "core/error.h"
#include "cpp/ranks.h"

namespace ringcomm::test {

inline bool quick = false;

// A stream for the rank of this thread.
class OwnStream {
 public:
  OwnStream() {
    cudaStream_t created;
    require(cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking) == cudaSuccess, "a stream");
    stream = reinterpret_cast<std::uintptr_t>(created);
  }
  ~OwnStream() { cudaStreamDestroy(get()); }
  static cudaStream_t get() { return reinterpret_cast<cudaStream_t>(stream); }
};

inline RankFunction on_own_stream(RankFunction function) {
  return [function](Engine& engine) {
    const OwnStream own;
    function(engine);
    engine.close();
  };
}

// What `body` throws: its code, and all of its text must have `words`.
template <typename Body>
void throws(ErrorCode code, const std::vector<std::string>& words, const std::string& what, const Body& body) {
  try {
    body();
  } catch (const Error& error) {
    require(error.code() == code, concat(what, ": another kind of error: ", error.what()));
    for (const std::string& word : words)
      require(std::strstr(error.what(), word.c_str()) != nullptr,
              concat(what, ": no \"", word, "\" in: ", error.what()));
    return;
  }
  require(false, what + ": no error");
}

// What `body` writes to stderr.
inline std::string said_by(const std::function<void()>& body) {
  const int file = memfd_create("said", 0), kept = dup(2);
  dup2(file, 2);
  body();
  dup2(kept, 2);
  close(kept);
  std::string text(static_cast<std::size_t>(lseek(file, 0, SEEK_END)), '\0');
  require(pread(file, text.data(), text.size(), 0) == static_cast<ssize_t>(text.size()), "what was said");
  close(file);
  return text;
}

inline std::vector<std::unique_ptr<Engine>> make_ranks(int world_size, EngineOptions options = short_timeout(),
                                                       int ranks_per_device = 8) {
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::string> handles;
  for (int r = 0; r < world_size; ++r) {
    options.device = r / ranks_per_device;
    engines.push_back(make_cuda_engine(r, world_size, options));
    handles.push_back(engines.back()->handle());
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < world_size; ++r) threads.emplace_back([&, r] { engines[r]->connect(handles); });
  for (auto& thread : threads) thread.join();
  return engines;
}

inline Call all_reduce_of(std::vector<float>& data, std::uintptr_t on = stream) {
  Call call;
  call.op = Op::kAllReduce;
  call.dtype = DType::kFloat32;
  call.input = call.output = data.data();
  call.count = data.size();
  call.stream = on;
  return call;
}

inline EngineOptions limit(std::int64_t timeout_ms) {
  EngineOptions options;
  options.timeout_ms = timeout_ms;
  return options;
}

// ---- sections

struct Section {
  const char* name;
  std::function<void()> body;
  std::vector<std::pair<const char*, const char*>> environment;
  bool forks = false;  // makes its own processes
};

inline const std::vector<std::pair<const char*, const char*>> kApart{{"RINGCOMM_CUDA_APART", "1"}};

inline std::function<void()> threads(int world_size, RankFunction function) {
  return [=] { run_threads(world_size, function); };
}
inline std::function<void()> processes(int world_size, RankFunction function, std::int64_t timeout_ms = 60000) {
  return [=] { run_processes(world_size, function, limit(timeout_ms)); };
}

inline void run_section(const Section& section) {
  const auto begin = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child == 0) {
    alarm(280);  // a hang ends the section
    for (const auto& [name, value] : section.environment) setenv(name, value, 1);
    try {
      section.body();
    } catch (const std::exception& error) {
      require(false, concat(section.name, ": ", error.what()));
    }
    std::fflush(nullptr);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  std::printf("%-24s %s, %.1f s\n", section.name, status == 0 ? "ok" : "FAILED", took.count());
  std::fflush(stdout);
  if (status != 0) std::exit(1);
}

// `program [quick] [names of sections]`
inline void run_sections(const char* name, const std::vector<Section>& all, int argc, char** argv) {
  setenv("RINGCOMM_EMULATED_DEVICES", "2", 0);
  setenv("RINGCOMM_EMULATED_SMS", "1", 0);
  setenv("RINGCOMM_CUDA_THREADS", "8", 0);
  setenv("RINGCOMM_CUDA_LAYOUT",
         "channels=2,slot_bytes=4096,stage_bytes=107520,packet_bytes=1920,p2p_channels=2,p2p_slot_bytes=4096", 0);
  std::vector<std::string> wanted;
  for (int i = 1; i < argc; ++i) wanted.push_back(argv[i]);
  if (!wanted.empty() && wanted[0] == "quick") quick = true, wanted.erase(wanted.begin());
  for (const std::string& name : wanted)
    if (std::none_of(all.begin(), all.end(), [&](const Section& section) { return name == section.name; }))
      require(false, "a section that exists, not " + name);
  for (const Section& section : all) {
    if (section.forks && !kProcesses) continue;
    bool picked = wanted.empty();
    for (const std::string& name : wanted) picked = picked || name == section.name;
    if (picked) run_section(section);
  }
  std::printf("%s passed\n", name);
}

}  // namespace ringcomm::test
