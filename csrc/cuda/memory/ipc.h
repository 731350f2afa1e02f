// Device memory that ranks of other processes can open, and memory of theirs, opened. There are two kinds of handles:
// CUDA IPC, the usual one, and memory of the driver's virtual memory functions, passed as a file descriptor, where IPC
// does not work. RINGCOMM_CUDA_HANDLES=ipc|vmm forces one.
//
// If IPC memory is freed while a peer has it open, the result is undefined for that peer. Freeing therefore waits: see
// deferred_frees.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/memory/control_socket.h"
#include "cuda/memory/vmm.h"

namespace ringcomm::cuda {

const char* name(HandleKind kind);

struct MemoryHandle {
  std::uint64_t magic = 0;  // kMemoryMagic
  HandleKind kind = HandleKind::kPrivate;
  std::uint32_t unused = 0;
  Identity identity{};
  std::uint64_t address = 0;  // in the owner's process
  std::uint64_t nbytes = 0;
  cudaIpcMemHandle_t ipc{};
  std::uint64_t unused2[2] = {};
};
static_assert(sizeof(MemoryHandle) == 128, "a handle has 128 bytes, so that its collective needs no sizes");
inline constexpr std::uint64_t kMemoryMagic = 0x72696e67'6d656d31u;

class DeviceMemory {
 public:
  // Memory of `device`. nbytes is rounded up, so that no other allocation shares the driver's blocks with it.
  static std::shared_ptr<DeviceMemory> create(int device, std::size_t nbytes, bool zeroed, const char* what, int rank);
  // Memory of a peer in another process, for use on `device`. Takes over `fd` (kVmm only).
  static std::shared_ptr<DeviceMemory> open(const MemoryHandle& handle, int fd, int device, int rank, int peer);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  char* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  const MemoryHandle& handle() const { return handle_; }
  const std::string& why_private() const { return why_private_; }
  int fd() const { return fd_; }  // kVmm: to be passed to the peers
  void close_fd();                // once all peers have it
  // Lets another device of this process access it, where enabling peer access does not do that.
  void grant(int device, int rank);

 private:
  DeviceMemory() = default;
  void allocate_ipc(const char* what, int rank);
  void allocate_vmm(const char* what, int rank);

  char* data_ = nullptr;
  std::size_t nbytes_ = 0;
  int device_ = 0, fd_ = -1, pid_ = 0;
  bool opened_ = false;
  MemoryHandle handle_;
  VmmRange range_;
  std::string why_private_;
};

// Memory of ranks that are gone, until the peers that opened it have closed it, and the messages of such ranks to peers
// whose sockets were full. It is checked whenever a rank comes or goes in this process. The end of the process frees
// the rest, and tells the peers too.
namespace deferred_frees {
struct Peer {
  int rank;
  Process process;
};
using Messages = std::vector<std::pair<ControlSocket::Address, ControlMessage>>;
void add(std::unique_ptr<ControlSocket> control, std::vector<std::shared_ptr<DeviceMemory>> memories,
         std::vector<Peer> peers, Messages unsent);
void sweep();
std::size_t count();  // for tests
}  // namespace deferred_frees

}  // namespace ringcomm::cuda
