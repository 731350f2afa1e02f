// What the tests of the CUDA engine's memory share: small groups, errors by their words, a look for leaks.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <fstream>
#include <memory>

#include "cpp/ranks.h"
#include "cuda/memory/peer_memory.h"

namespace ringcomm::test {

using cuda::Layout;
using cuda::PeerMemory;
using cuda::RankHandle;
using Groups = std::vector<std::unique_ptr<PeerMemory>>;

inline constexpr std::int64_t kLimitMs = 20000;

inline Layout small_layout(int world_size, int channels = 2) {
  Layout layout;
  layout.world_size = world_size;
  layout.channels = channels;
  layout.depth = layout.p2p_depth = 2;
  layout.slot_bytes = layout.p2p_slot_bytes = 256;
  layout.stage_bytes = kLineBytes * static_cast<std::uint64_t>(world_size);
  layout.packet_bytes = 1920;
  return layout;
}

inline std::string outcome(const std::function<void()>& function) {
  try {
    function();
  } catch (const Error& error) {
    return concat(static_cast<int>(error.code()), ' ', error.what());
  }
  return "no error";
}
inline void require_error(const std::string& got, ErrorCode code, const std::vector<std::string>& words) {
  bool ok = got.rfind(concat(static_cast<int>(code), ' '), 0) == 0;
  for (const auto& word : words) ok = ok && got.find(word) != std::string::npos;
  std::string all;
  for (const auto& word : words) all += " \"" + word + "\"";
  require(ok, concat("expected error ", static_cast<int>(code), " with", all, ", got ", got));
}

inline int open_files() {
  int count = 0;
  DIR* const folder = opendir("/proc/self/fd");
  while (readdir(folder)) ++count;
  closedir(folder);
  return count;
}

inline Location locate(PeerMemory& group, const void* data, std::size_t nbytes) {
  return group.locate(data, nbytes, false, "test");
}

// Emulated device memory that this process has mapped.
inline int mappings() {
  int count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) count += line.find("/memfd:ringcomm") != std::string::npos;
  return count;
}

inline Groups make(int world_size, const std::function<int(int)>& device = [](int) { return 0; }) {
  Groups groups;
  for (int r = 0; r < world_size; ++r)
    groups.push_back(std::make_unique<PeerMemory>(r, device(r), small_layout(world_size), kLimitMs));
  return groups;
}
inline std::vector<std::string> handles_of(const Groups& groups) {
  std::vector<std::string> handles;
  for (const auto& group : groups) handles.push_back(group->handle());
  return handles;
}
// What connect ended with on each rank.
inline std::vector<std::string> connect(Groups& groups, const std::vector<std::string>& handles) {
  std::vector<std::string> outcomes(groups.size());
  std::vector<std::thread> threads;
  for (std::size_t r = 0; r < groups.size(); ++r)
    threads.emplace_back([&, r] { outcomes[r] = outcome([&] { groups[r]->connect(handles); }); });
  for (auto& thread : threads) thread.join();
  return outcomes;
}
inline void connect(Groups& groups) {
  for (const auto& got : connect(groups, handles_of(groups))) require(got == "no error", got);
}

}  // namespace ringcomm::test
