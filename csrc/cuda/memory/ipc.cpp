#include "cuda/memory/ipc.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <list>
#include <mutex>

#include "core/error.h"
#include "core/types.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

// The driver packs small allocations into blocks of this size, and an IPC handle opens the whole block.
constexpr std::size_t kBlockBytes = 2u << 20;

// The kind that the environment asks for; kPrivate: none.
HandleKind wanted_kind(int rank) {
  const char* const value = std::getenv("RINGCOMM_CUDA_HANDLES");
  const std::string kind = value ? value : "";
  if (kind.empty()) return HandleKind::kPrivate;
  if (kind == "ipc") return HandleKind::kIpc;
  if (kind == "vmm") return HandleKind::kVmm;
  fail(ErrorCode::kInvalid, "communicator: rank ", rank, " expected RINGCOMM_CUDA_HANDLES to be ipc or vmm, got \"",
       kind, "\"; unset it to let ringcomm choose");
}

void set_to_zero(char* data, std::size_t nbytes, int rank) {
  cudaStream_t stream = nullptr;  // its own: the default stream may wait for others
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", rank);
  cudaError_t status = cudaMemsetAsync(data, 0, nbytes, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  tolerate(cudaStreamDestroy(stream), "cudaStreamDestroy");
  check(status, "clearing shared device memory", rank);
}

}  // namespace

const char* name(HandleKind kind) {
  return kind == HandleKind::kIpc ? "ipc" : kind == HandleKind::kVmm ? "vmm" : "private";
}

void DeviceMemory::allocate_ipc(const char* what, int rank) {
  void* data = nullptr;
  check(cudaMalloc(&data, nbytes_), concat("cudaMalloc of ", nbytes_, " bytes for ", what).c_str(), rank);
  data_ = static_cast<char*>(data);
  const cudaError_t status = cudaIpcGetMemHandle(&handle_.ipc, data);
  if (status == cudaSuccess) {
    handle_.kind = HandleKind::kIpc;
    return;
  }
  cudaGetLastError();
  why_private_ = concat("cudaIpcGetMemHandle gave \"", cudaGetErrorString(status), "\"");
}

void DeviceMemory::allocate_vmm(const char* what, int rank) {
  try {
    check(cudaFree(nullptr), "making a context", rank);  // the driver's functions do not make one
    range_ = vmm_create(device_, nbytes_, rank);
    data_ = range_.data;
    nbytes_ = range_.nbytes;
    fd_ = vmm_export(range_.allocation, rank);
  } catch (const Error& error) {
    throw Error(error.code(), concat(error.what(), ", for ", what));
  }
  handle_.kind = HandleKind::kVmm;
}

std::shared_ptr<DeviceMemory> DeviceMemory::create(int device, std::size_t nbytes, bool zeroed, const char* what,
                                                   int rank) {
  const DeviceScope on(device, rank);
  const std::shared_ptr<DeviceMemory> memory(new DeviceMemory);
  memory->device_ = device;
  memory->pid_ = getpid();
  memory->nbytes_ = round_up(nbytes ? nbytes : 1, kBlockBytes);
  memory->handle_.magic = kMemoryMagic;
  memory->handle_.identity = random_identity();
  const HandleKind wanted = wanted_kind(rank);
  const std::string why_not = wanted == HandleKind::kIpc ? "" : why_no_vmm(device);
  if (wanted == HandleKind::kVmm) {
    if (!why_not.empty())
      fail(ErrorCode::kUnsupported, "communicator: rank ", rank, " expected handles of the kind vmm, got none, since ",
           why_not, "; unset RINGCOMM_CUDA_HANDLES");
    memory->allocate_vmm(what, rank);
  } else {
    memory->allocate_ipc(what, rank);
    if (memory->handle_.kind == HandleKind::kPrivate && wanted == HandleKind::kPrivate) {
      if (why_not.empty()) {
        check(cudaFree(memory->data_), "cudaFree", rank);
        memory->data_ = nullptr;
        memory->allocate_vmm(what, rank);
      } else {
        memory->why_private_ += ", and " + why_not;
      }
    }
  }
  memory->handle_.address = reinterpret_cast<std::uint64_t>(memory->data_);
  memory->handle_.nbytes = memory->nbytes_;
  if (zeroed) set_to_zero(memory->data_, memory->nbytes_, rank);
  return memory;
}

std::shared_ptr<DeviceMemory> DeviceMemory::open(const MemoryHandle& handle, int fd, int device, int rank, int peer) {
  const DeviceScope on(device, rank);
  const std::shared_ptr<DeviceMemory> memory(new DeviceMemory);
  memory->device_ = device;
  memory->pid_ = getpid();
  memory->opened_ = true;
  memory->fd_ = fd;
  memory->handle_ = handle;
  memory->nbytes_ = handle.nbytes;
  if (handle.kind == HandleKind::kVmm) {
    check(cudaFree(nullptr), "making a context", rank);
    memory->range_ = vmm_open(fd, handle.nbytes, device, rank);
    memory->data_ = memory->range_.data;
    memory->close_fd();
    return memory;
  }
  void* data = nullptr;
  const cudaError_t status = cudaIpcOpenMemHandle(&data, handle.ipc, cudaIpcMemLazyEnablePeerAccess);
  if (status == cudaSuccess) {
    memory->data_ = static_cast<char*>(data);
    return memory;
  }
  cudaGetLastError();
  fail(ErrorCode::kUnsupported, "connect: rank ", rank, " expected to open the device memory of rank ", peer, ", got ",
       cudaGetErrorString(status), " (", cudaGetErrorName(status),
       "); see that the processes share one IPC namespace and that their GPUs reach each other (nvidia-smi topo -p2p "
       "r), "
       "try RINGCOMM_CUDA_HANDLES=vmm, or use NCCL here");
}

DeviceMemory::~DeviceMemory() {
  close_fd();
  if (!data_ || process_is_ending() || pid_ != getpid()) return;
  try {
    const DeviceScope on(device_, -1);
    if (range_.data)
      vmm_release(range_);
    else if (opened_)
      tolerate(cudaIpcCloseMemHandle(data_), "cudaIpcCloseMemHandle");
    else
      tolerate(cudaFree(data_), "cudaFree");
  } catch (const Error&) {
    // The context is lost, and the memory with it.
  }
}

void DeviceMemory::close_fd() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void DeviceMemory::grant(int device, int rank) {
  if (range_.data && device != device_) vmm_grant(range_, device, rank);
}

// ---- memory that peers may still have open -------------------------------------------------------------------------

namespace {

struct DeferredFree {
  std::unique_ptr<ControlSocket> control;
  std::vector<std::shared_ptr<DeviceMemory>> memories;
  std::vector<deferred_frees::Peer> peers;
  deferred_frees::Messages unsent;
  int pid;

  // Whether no peer has the memory open any more, and all have been told.
  bool is_due() {
    unsent.erase(std::remove_if(unsent.begin(), unsent.end(),
                                [&](const auto& message) {
                                  return control->send(message.first, message.second) !=
                                         ControlSocket::SendResult::kFull;
                                }),
                 unsent.end());
    while (control->receive(0)) continue;
    ControlMessage message;
    while (control->take(ControlMessage::kClosed, -1, nullptr, message))
      peers.erase(std::remove_if(peers.begin(), peers.end(), [&](auto& m) { return m.rank == message.from; }),
                  peers.end());
    peers.erase(std::remove_if(peers.begin(), peers.end(), [](auto& m) { return m.process.has_exited(); }),
                peers.end());
    return peers.empty() && unsent.empty();
  }
};

// These outlive whatever may still be destroyed at exit.
std::mutex& deferred_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::list<DeferredFree>& all_deferred() {
  static auto* const all = new std::list<DeferredFree>;
  return *all;
}

}  // namespace

void deferred_frees::add(std::unique_ptr<ControlSocket> control, std::vector<std::shared_ptr<DeviceMemory>> memories,
                         std::vector<Peer> peers, Messages unsent) {
  const std::lock_guard<std::mutex> lock(deferred_mutex());
  all_deferred().push_back({std::move(control), std::move(memories), std::move(peers), std::move(unsent), getpid()});
}

void deferred_frees::sweep() {
  if (process_is_ending()) return;
  std::list<DeferredFree> done;  // memory is freed outside the lock
  const std::lock_guard<std::mutex> lock(deferred_mutex());
  std::list<DeferredFree>& all = all_deferred();
  for (auto it = all.begin(); it != all.end();) {
    const auto next = std::next(it);
    if (it->pid == getpid() && it->is_due()) done.splice(done.end(), all, it);
    it = next;
  }
}

std::size_t deferred_frees::count() {
  const std::lock_guard<std::mutex> lock(deferred_mutex());
  return all_deferred().size();
}

}  // namespace ringcomm::cuda
