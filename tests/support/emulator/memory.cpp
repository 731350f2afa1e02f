// The runtime API's memory. Device memory is a memory file of its own for each allocation, so that another process can
// map it: an IPC handle names the process and its descriptor, which the other opens through /proc.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "gpu.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kNoiseBytes = std::size_t{4} << 20;  // fresh memory is not zero, at its beginning at least
constexpr std::uint64_t kMagic = 0x72696e67636f6d6d;

struct Allocation {
  std::size_t nbytes = 0, mapped = 0;
  int device = 0, fd = -1;  // fd < 0: of another process
  cudaMemoryType type = cudaMemoryTypeDevice;
  int opened = 1;  // imported so often
  std::uint64_t inode = 0;
  std::uint64_t id = 0;     // of an allocation of this process, never used again
  bool registered = false;  // the caller's own, from cudaHostRegister
};
struct Handle {  // what is in a cudaIpcMemHandle_t
  std::uint64_t magic, inode, nbytes;
  std::int32_t pid, fd, device;
};
static_assert(sizeof(Handle) <= sizeof(cudaIpcMemHandle_t), "a handle has 64 bytes");

// Under the mutex of the GPU.
std::map<std::uintptr_t, Allocation>& allocations() {
  static auto* const all = new std::map<std::uintptr_t, Allocation>;
  return *all;
}
using Found = std::map<std::uintptr_t, Allocation>::iterator;

std::uintptr_t address(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }
Found find(const void* pointer) {
  auto& all = allocations();
  auto at = all.upper_bound(address(pointer));
  if (at == all.begin()) return all.end();
  --at;
  return address(pointer) < at->first + at->second.nbytes ? at : all.end();
}
Found find_start(const void* pointer, cudaMemoryType type) {
  const auto at = allocations().find(address(pointer));
  return at != allocations().end() && at->second.type == type ? at : allocations().end();
}
std::size_t pages(std::size_t nbytes) { return (nbytes + 4095) / 4096 * 4096; }

// The file's pages, and one that nobody may touch.
void* map_file(int fd, std::size_t nbytes) {
  const std::size_t mapped = pages(nbytes);
  void* const memory = mmap(nullptr, mapped + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  if (mmap(memory, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(memory, mapped + 4096);
    return nullptr;
  }
  poison(static_cast<char*>(memory) + nbytes, mapped - nbytes);
  return memory;
}
void unmap_file(void* memory, std::size_t mapped) {
  unpoison(memory, mapped);
  munmap(memory, mapped + 4096);
}
std::uint64_t inode_of(int fd) {
  struct stat status{};
  return fstat(fd, &status) == 0 ? static_cast<std::uint64_t>(status.st_ino) : 0;
}

cudaError_t allocate(void** memory, std::size_t nbytes) {
  const int fd = memfd_create("ringcomm-emulated-gpu", MFD_CLOEXEC);
  if (fd < 0) return cudaErrorMemoryAllocation;
  void* const at = ftruncate(fd, static_cast<off_t>(pages(nbytes))) == 0 ? map_file(fd, nbytes) : nullptr;
  if (!at) {
    close(fd);
    return cudaErrorMemoryAllocation;
  }
  std::memset(at, 0xa5, nbytes < kNoiseBytes ? nbytes : kNoiseBytes);
  Allocation allocation;
  allocation.nbytes = nbytes;
  allocation.mapped = pages(nbytes);
  allocation.device = current_device();
  allocation.fd = fd;
  allocation.inode = inode_of(fd);
  static std::uint64_t ids = 0;
  allocation.id = ++ids;
  allocations()[address(at)] = allocation;
  *memory = at;
  return cudaSuccess;
}

cudaError_t open_handle(void** memory, const Handle& handle) {
  if (handle.magic != kMagic) return cudaErrorInvalidResourceHandle;
  if (handle.pid == getpid()) return cudaErrorDeviceUninitialized;
  for (auto& [at, allocation] : allocations())
    if (allocation.inode == handle.inode && allocation.fd < 0 && allocation.type == cudaMemoryTypeDevice) {
      ++allocation.opened;
      *memory = reinterpret_cast<void*>(at);
      return cudaSuccess;
    }
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return cudaErrorMapBufferObjectFailed;
  void* const at = inode_of(fd) == handle.inode ? map_file(fd, handle.nbytes) : nullptr;  // it may be freed by now
  close(fd);
  if (!at) return cudaErrorMapBufferObjectFailed;
  Allocation allocation;
  allocation.nbytes = handle.nbytes;
  allocation.mapped = pages(handle.nbytes);
  allocation.device = current_device();
  allocation.inode = handle.inode;
  allocations()[address(at)] = allocation;
  *memory = at;
  return cudaSuccess;
}

cudaError_t call_on(cudaStream_t handle, std::function<void()> call, bool and_wait, int other_device = -1) {
  return locked([&](Gpu& gpu, std::unique_lock<std::mutex>& lock) {
    if (const cudaError_t error = and_wait ? forbid_in_capture() : cudaSuccess) return error;
    Stream* const stream = gpu.resolve(handle, current_device());
    if (!stream) return cudaErrorInvalidResourceHandle;
    Work work{Kind::kCall, {}, {}, {}, {}, false, std::move(call)};
    if (other_device != stream->device) work.other_device = other_device;
    const cudaError_t error = submit(gpu, stream, std::move(work));
    if (error || !and_wait) return error;
    gpu.wait(lock, stream);
    return gpu.error_of(stream->device);
  });
}

}  // namespace
}  // namespace ringcomm::emulator

using namespace ringcomm::emulator;
using Lock = std::unique_lock<std::mutex>;

cudaError_t cudaMalloc(void** memory, std::size_t nbytes) {
  return locked([&](Gpu&, Lock&) {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (!memory) return cudaErrorInvalidValue;
    *memory = nullptr;
    return nbytes == 0 ? cudaSuccess : allocate(memory, nbytes);
  });
}
cudaError_t cudaFree(void* memory) {
  return locked([&](Gpu& gpu, Lock& lock) {
    if (!memory) return cudaSuccess;
    if (const cudaError_t error = forbid_in_capture()) return error;
    const auto at = find_start(memory, cudaMemoryTypeDevice);
    if (at == allocations().end() || at->second.fd < 0) return cudaErrorInvalidValue;
    gpu.wait_device(lock, at->second.device);  // as the real one does
    unmap_file(memory, at->second.mapped);
    close(at->second.fd);
    allocations().erase(at);
    return cudaSuccess;
  });
}

cudaError_t cudaHostAlloc(void** memory, std::size_t nbytes, unsigned) {
  return locked([&](Gpu&, Lock&) {
    if (const cudaError_t error = forbid_in_capture()) return error;
    if (!memory) return cudaErrorInvalidValue;
    *memory = nbytes ? std::aligned_alloc(4096, pages(nbytes)) : nullptr;
    if (nbytes == 0) return cudaSuccess;
    if (!*memory) return cudaErrorMemoryAllocation;
    std::memset(*memory, 0xa5, nbytes < kNoiseBytes ? nbytes : kNoiseBytes);
    Allocation allocation;
    allocation.nbytes = nbytes;
    allocation.device = current_device();
    allocation.type = cudaMemoryTypeHost;
    allocations()[address(*memory)] = allocation;
    return cudaSuccess;
  });
}
cudaError_t cudaFreeHost(void* memory) {
  return locked([&](Gpu& gpu, Lock& lock) {
    if (!memory) return cudaSuccess;
    const auto at = find_start(memory, cudaMemoryTypeHost);
    if (at == allocations().end() || at->second.registered) return cudaErrorInvalidValue;
    gpu.wait_device(lock, at->second.device);
    allocations().erase(at);
    std::free(memory);
    return cudaSuccess;
  });
}
cudaError_t cudaHostGetDevicePointer(void** on_device, void* on_host, unsigned) {
  return locked([&](Gpu&, Lock&) {
    const auto at = find(on_host);
    if (at == allocations().end() || at->second.type != cudaMemoryTypeHost) return cudaErrorInvalidValue;
    *on_device = on_host;
    return cudaSuccess;
  });
}
cudaError_t cudaHostRegister(void* memory, std::size_t nbytes, unsigned) {
  return locked([&](Gpu&, Lock&) {
    if (!memory || !nbytes) return cudaErrorInvalidValue;
    if (find(memory) != allocations().end()) return cudaErrorHostMemoryAlreadyRegistered;
    Allocation allocation;
    allocation.nbytes = nbytes;
    allocation.device = current_device();
    allocation.type = cudaMemoryTypeHost;
    allocation.registered = true;
    allocations()[address(memory)] = allocation;
    return cudaSuccess;
  });
}
cudaError_t cudaHostUnregister(void* memory) {
  return locked([&](Gpu&, Lock&) {
    const auto at = find_start(memory, cudaMemoryTypeHost);
    if (at == allocations().end() || !at->second.registered) return cudaErrorHostMemoryNotRegistered;
    allocations().erase(at);
    return cudaSuccess;
  });
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  return locked([&](Gpu&, Lock&) {
    if (!attributes || !pointer) return cudaErrorInvalidValue;
    void* const same = const_cast<void*>(pointer);
    *attributes = {cudaMemoryTypeDevice, current_device(), same, nullptr};
    const auto at = find(pointer);
    if (at == allocations().end()) return cudaSuccess;  // any memory of the host
    attributes->type = at->second.type;
    attributes->device = at->second.device;
    if (at->second.type == cudaMemoryTypeHost) attributes->hostPointer = same;
    return cudaSuccess;
  });
}

// Under the mutex of the GPU.
bool ringcomm::emulator::find_allocation(std::uint64_t pointer, Range& range) {
  const auto at = find(reinterpret_cast<const void*>(pointer));
  if (at == allocations().end() || at->second.type != cudaMemoryTypeDevice || at->second.fd < 0) return false;
  range = {at->first, at->second.nbytes, at->second.id};
  return true;
}

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t* handle, void* memory) {
  return locked([&](Gpu&, Lock&) {
    const auto at = find(memory);  // an address inside gives the handle of the whole, as the real one does
    if (!handle || at == allocations().end() || at->second.fd < 0) return cudaErrorInvalidValue;
    const Handle contents{kMagic, at->second.inode, at->second.nbytes, getpid(), at->second.fd, at->second.device};
    *handle = {};
    std::memcpy(handle, &contents, sizeof contents);
    return cudaSuccess;
  });
}
cudaError_t cudaIpcOpenMemHandle(void** memory, cudaIpcMemHandle_t handle, unsigned flags) {
  return locked([&](Gpu&, Lock&) {
    if (!memory || flags != cudaIpcMemLazyEnablePeerAccess) return cudaErrorInvalidValue;
    Handle contents;
    std::memcpy(&contents, &handle, sizeof contents);
    return open_handle(memory, contents);
  });
}
cudaError_t cudaIpcCloseMemHandle(void* memory) {
  return locked([&](Gpu& gpu, Lock& lock) {
    const auto at = find_start(memory, cudaMemoryTypeDevice);
    if (at == allocations().end() || at->second.fd >= 0) return cudaErrorInvalidValue;
    if (--at->second.opened > 0) return cudaSuccess;
    gpu.wait_device(lock, at->second.device);
    unmap_file(memory, at->second.mapped);
    allocations().erase(at);
    return cudaSuccess;
  });
}

// An aligned word is copied as one unit, as on a device: flags are set this way while kernels poll them.
static void copy_bytes(void* to, const void* from, std::size_t nbytes) {
  if (nbytes == sizeof(std::uint64_t) && address(to) % nbytes == 0 && address(from) % nbytes == 0)
    __atomic_store_n(static_cast<std::uint64_t*>(to),
                     __atomic_load_n(static_cast<const std::uint64_t*>(from), __ATOMIC_ACQUIRE), __ATOMIC_RELEASE);
  else if (nbytes)
    std::memcpy(to, from, nbytes);
}

static cudaError_t copy_on(cudaStream_t stream, void* to, const void* from, std::size_t nbytes, int other_device) {
  if (nbytes && (!to || !from)) return note(cudaErrorInvalidValue);
  const unsigned pause_us = Gpu::get().config.copy_us;
  return call_on(
      stream,
      [=] {
        if (pause_us > 0) usleep(pause_us);
        copy_bytes(to, from, nbytes);
      },
      false, other_device);
}
// The device of memory that was allocated here, other than the current one; else -1.
static int other_device_of(const void* memory) {
  int device = -1;
  locked([&](Gpu&, Lock&) {
    const auto at = find(memory);
    if (at != allocations().end() && at->second.type == cudaMemoryTypeDevice) device = at->second.device;
    return cudaSuccess;
  });
  return device == current_device() ? -1 : device;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind, cudaStream_t stream) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return note(cudaErrorInvalidMemcpyDirection);
  return copy_on(stream, to, from, nbytes, std::max(other_device_of(to), other_device_of(from)));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t nbytes, cudaMemcpyKind kind) {
  if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return note(cudaErrorInvalidMemcpyDirection);
  if (nbytes && (!to || !from)) return note(cudaErrorInvalidValue);
  return call_on(nullptr, [=] { copy_bytes(to, from, nbytes); }, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int to_device, const void* from, int from_device, std::size_t nbytes,
                                cudaStream_t stream) {
  const int devices = Gpu::get().config.devices;
  if (to_device < 0 || to_device >= devices || from_device < 0 || from_device >= devices)
    return note(cudaErrorInvalidDevice);
  return copy_on(stream, to, from, nbytes, to_device == current_device() ? from_device : to_device);
}
cudaError_t cudaMemcpyBatchAsync(void* const* to, const void* const* from, const std::size_t* nbytes, std::size_t count,
                                 cudaMemcpyAttributes* attributes, std::size_t* first_of_attributes,
                                 std::size_t num_attributes, cudaStream_t stream) {
  const bool valid = count > 0 && num_attributes == 1 && first_of_attributes[0] == 0 &&
                     attributes->srcAccessOrder == cudaMemcpySrcAccessOrderStream;
  if (!valid || !stream || stream == cudaStreamLegacy) return note(cudaErrorInvalidValue);
  struct Copy {
    void* to;
    const void* from;
    std::size_t nbytes;
  };
  std::vector<Copy> copies;
  for (std::size_t i = count; i-- > 0;) {
    if (!to[i] || !from[i] || nbytes[i] == 0) return note(cudaErrorInvalidValue);
    copies.push_back({to[i], from[i], nbytes[i]});
  }
  return call_on(
      stream,
      [=] {
        for (const Copy& copy : copies) copy_bytes(copy.to, copy.from, copy.nbytes);
      },
      false);
}
cudaError_t cudaMemsetAsync(void* memory, int value, std::size_t nbytes, cudaStream_t stream) {
  if (nbytes && !memory) return note(cudaErrorInvalidValue);
  return call_on(
      stream,
      [=] {
        if (nbytes) std::memset(memory, value, nbytes);
      },
      false);
}
cudaError_t cudaMemset(void* memory, int value, std::size_t nbytes) {
  if (nbytes && !memory) return note(cudaErrorInvalidValue);
  return call_on(
      nullptr,
      [=] {
        if (nbytes) std::memset(memory, value, nbytes);
      },
      true);
}
