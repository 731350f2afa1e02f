// The handle that a rank sends to the others before they can access its memory: where it runs, its settings, which
// must be equal, and where its segment and its control socket are. It is one line of text, which stores of all kinds
// can carry.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "cuda/device/args.h"
#include "cuda/memory/control_socket.h"
#include "cuda/memory/ipc.h"
#include "cuda/memory/topology.h"

namespace ringcomm::cuda {

struct RankHandle {
  std::string machine;         // kernel and namespaces: equal if the processes can reach each other
  std::uint64_t instance = 0;  // of the process; a forked child has another one
  Process process;
  int rank = -1;
  Layout layout;
  Identity identity{};  // of the rank in this communicator
  ControlSocket::Address control;
  std::string settings;  // beside the layout, they decide the plans and must be equal: "sms=132,sm=90,..."
  int device = 0;        // index in its own process
  std::string uuid, bus_id;
  MemoryHandle segment;
  std::vector<std::pair<std::string, Path>> paths;  // from its device to those that it sees, by uuid
  std::string why_private;                          // kPrivate: why the segment has no handle

  std::string pack() const;
  // `rank`: the reader, for errors.
  static RankHandle unpack(const std::string& text, int rank);
  std::string device_text() const;  // "GPU 0 (0000:3b:00.0)"
  Path path_to(const RankHandle& other) const;
};

std::string text_of(const Layout& layout);  // "channels=24,depth=4,..."
// The default layout, which is the same on every rank that has the same options and environment. RINGCOMM_CUDA_LAYOUT
// changes single numbers, in the format of text_of.
Layout default_layout(int world_size, const EngineOptions& options);

std::string pack(const MemoryHandle& handle);  // printable
bool unpack(const std::string& text, MemoryHandle& handle);

}  // namespace ringcomm::cuda
