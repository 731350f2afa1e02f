// The driver's virtual memory. Physical memory is a memory file, identified by the number of its handle. A reserved
// address range may not be touched until something is mapped there and access is given.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <string>

#include "gpu.h"

namespace ringcomm::emulator {
namespace {

constexpr std::size_t kGranularity = std::size_t{2} << 20;

struct Physical {
  int fd = -1, users = 0;  // handles that are held, and mappings
  std::size_t nbytes = 0;
  CUmemAllocationProp properties{};
};
struct FabricHandle {  // what is in the 64 bytes
  int pid, fd;
};
struct Mapping {
  std::size_t nbytes = 0;
  CUmemGenericAllocationHandle handle = 0;
  std::uint64_t id = 0;
  std::set<int> devices;  // with access
};

// Under the mutex of the GPU.
struct Memory {
  std::map<CUmemGenericAllocationHandle, Physical> physical;
  std::map<CUdeviceptr, std::size_t> reserved;
  std::map<CUdeviceptr, Mapping> mapped;
  CUmemGenericAllocationHandle handles = 0;
  std::uint64_t ids = std::uint64_t{1} << 32;  // none that cudaMalloc gives

  static Memory& get() {
    static auto* const memory = new Memory;
    return *memory;
  }
  void let_go(CUmemGenericAllocationHandle handle) {
    const auto at = physical.find(handle);
    if (--at->second.users > 0) return;
    close(at->second.fd);
    physical.erase(at);
  }
  template <typename Ranges>
  static auto find(Ranges& ranges, CUdeviceptr address) {
    auto at = ranges.upper_bound(address);
    return at == ranges.begin() ? ranges.end() : std::prev(at);
  }
  std::map<CUdeviceptr, Mapping>::iterator mapping_around(CUdeviceptr address) {
    const auto at = find(mapped, address);
    return at != mapped.end() && address < at->first + at->second.nbytes ? at : mapped.end();
  }
  // Whether whole mappings, one behind the other, fill a range.
  bool is_filled(CUdeviceptr address, std::size_t nbytes) {
    const CUdeviceptr end = address + nbytes;
    while (address < end) {
      const auto at = mapped.find(address);
      if (at == mapped.end()) return false;
      address += at->second.nbytes;
    }
    return nbytes > 0 && address == end;
  }
};

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)); }

template <typename Call>
CUresult with_memory(const Call& call) {
  if (const cudaError_t error = usable()) return error;
  const std::lock_guard<std::mutex> lock(Gpu::get().mutex);
  return call(Memory::get());
}

void add(Memory& memory, CUmemGenericAllocationHandle* handle, int fd, std::size_t nbytes,
         const CUmemAllocationProp& properties) {
  *handle = ++memory.handles;
  memory.physical[*handle] = {fd, 1, nbytes, properties};
}

}  // namespace
}  // namespace ringcomm::emulator

using namespace ringcomm::emulator;

CUresult cuGetErrorString(CUresult error, const char** text) {
  *text = cudaGetErrorString(error);
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 1;
  return usable();
}
CUresult cuMemGetAllocationGranularity(std::size_t* nbytes, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
  *nbytes = kGranularity;
  return usable();
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, std::size_t nbytes, const CUmemAllocationProp* properties,
                     unsigned long long flags) {
  return with_memory([&](Memory& memory) {
    if (flags || !nbytes || nbytes % kGranularity || properties->type != CU_MEM_ALLOCATION_TYPE_PINNED)
      return cudaErrorInvalidValue;
    const int fd = memfd_create("ringcomm-vmm", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(nbytes)) != 0) {
      if (fd >= 0) close(fd);
      return cudaErrorMemoryAllocation;
    }
    add(memory, handle, fd, nbytes, *properties);
    return cudaSuccess;
  });
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return with_memory([&](Memory& memory) {
    if (!memory.physical.count(handle)) return cudaErrorInvalidValue;
    memory.let_go(handle);
    return cudaSuccess;
  });
}

CUresult cuMemAddressReserve(CUdeviceptr* address, std::size_t nbytes, std::size_t, CUdeviceptr,
                             unsigned long long flags) {
  return with_memory([&](Memory& memory) {
    if (flags || !nbytes || nbytes % kGranularity) return cudaErrorInvalidValue;
    constexpr int kNobody = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    void* const at = mmap(nullptr, nbytes + kGranularity, PROT_NONE, kNobody, -1, 0);
    if (at == MAP_FAILED) return cudaErrorMemoryAllocation;
    const auto begin = reinterpret_cast<CUdeviceptr>(at),
               aligned = (begin + kGranularity - 1) / kGranularity * kGranularity;
    if (aligned > begin) munmap(at, aligned - begin);
    if (const std::size_t after = begin + kGranularity - aligned) munmap(pointer(aligned + nbytes), after);
    memory.reserved[*address = aligned] = nbytes;
    return cudaSuccess;
  });
}
CUresult cuMemAddressFree(CUdeviceptr address, std::size_t nbytes) {
  return with_memory([&](Memory& memory) {
    const auto range = memory.reserved.find(address);
    if (range == memory.reserved.end() || range->second != nbytes) return cudaErrorInvalidValue;
    const auto inside = memory.mapped.lower_bound(address);
    if (inside != memory.mapped.end() && inside->first < address + nbytes) return cudaErrorInvalidValue;
    munmap(pointer(address), nbytes);
    memory.reserved.erase(range);
    return cudaSuccess;
  });
}

CUresult cuMemMap(CUdeviceptr address, std::size_t nbytes, std::size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  return with_memory([&](Memory& memory) {
    const auto physical = memory.physical.find(handle);
    if (physical == memory.physical.end() || offset || flags || !nbytes || nbytes > physical->second.nbytes ||
        nbytes % kGranularity || address % kGranularity)
      return cudaErrorInvalidValue;
    const auto range = Memory::find(memory.reserved, address);
    if (range == memory.reserved.end() || address + nbytes > range->first + range->second) return cudaErrorInvalidValue;
    const auto before = Memory::find(memory.mapped, address + nbytes - 1);
    if (before != memory.mapped.end() && address < before->first + before->second.nbytes) return cudaErrorInvalidValue;
    if (mmap(pointer(address), nbytes, PROT_NONE, MAP_SHARED | MAP_FIXED, physical->second.fd, 0) == MAP_FAILED)
      return cudaErrorMemoryAllocation;
    ++physical->second.users;
    memory.mapped[address] = {nbytes, handle, ++memory.ids, {}};
    return cudaSuccess;
  });
}
CUresult cuMemUnmap(CUdeviceptr address, std::size_t nbytes) {
  return with_memory([&](Memory& memory) {
    if (!memory.is_filled(address, nbytes)) return cudaErrorInvalidValue;
    constexpr int kNobody = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
    if (mmap(pointer(address), nbytes, PROT_NONE, kNobody, -1, 0) == MAP_FAILED) return cudaErrorMemoryAllocation;
    for (auto at = memory.mapped.find(address); at != memory.mapped.end() && at->first < address + nbytes;) {
      memory.let_go(at->second.handle);
      at = memory.mapped.erase(at);
    }
    return cudaSuccess;
  });
}
CUresult cuMemSetAccess(CUdeviceptr address, std::size_t nbytes, const CUmemAccessDesc* accesses, std::size_t count) {
  return with_memory([&](Memory& memory) {
    if (!memory.is_filled(address, nbytes)) return cudaErrorInvalidValue;
    for (std::size_t i = 0; i < count; ++i) {
      const int device = accesses[i].location.id;
      if (device < 0 || device >= Gpu::get().config.devices) return cudaErrorInvalidDevice;
      if (accesses[i].flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return cudaErrorNotSupported;
      for (auto at = memory.mapped.find(address); at != memory.mapped.end() && at->first < address + nbytes; ++at)
        at->second.devices.insert(device);
    }
    mprotect(pointer(address), nbytes, PROT_READ | PROT_WRITE);
    return cudaSuccess;
  });
}
CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location, CUdeviceptr address) {
  return with_memory([&](Memory& memory) {
    const auto at = memory.mapping_around(address);
    if (at == memory.mapped.end()) return cudaErrorInvalidValue;
    *flags =
        at->second.devices.count(location->id) ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return cudaSuccess;
  });
}

CUresult cuMemExportToShareableHandle(void* to, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                      unsigned long long flags) {
  return with_memory([&](Memory& memory) {
    const auto physical = memory.physical.find(handle);
    if (physical == memory.physical.end() || flags || !(physical->second.properties.requestedHandleTypes & type))
      return cudaErrorInvalidValue;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
      const FabricHandle fabric{getpid(), physical->second.fd};
      std::memset(to, 0, 64);
      std::memcpy(to, &fabric, sizeof fabric);
      return cudaSuccess;
    }
    const int fd = fcntl(physical->second.fd, F_DUPFD_CLOEXEC, 0);
    std::memcpy(to, &fd, sizeof fd);
    return fd < 0 ? cudaErrorOperatingSystem : cudaSuccess;
  });
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* from,
                                        CUmemAllocationHandleType type) {
  return with_memory([&](Memory& memory) {
    int fd = -1;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
      FabricHandle fabric;
      std::memcpy(&fabric, from, sizeof fabric);
      fd = open(("/proc/" + std::to_string(fabric.pid) + "/fd/" + std::to_string(fabric.fd)).c_str(),
                O_RDWR | O_CLOEXEC);
    } else {
      fd = fcntl(static_cast<int>(reinterpret_cast<std::intptr_t>(from)), F_DUPFD_CLOEXEC, 0);
    }
    struct stat status{};
    if (fd < 0 || fstat(fd, &status) != 0 || status.st_size % static_cast<off_t>(kGranularity) != 0) {
      if (fd >= 0) close(fd);
      return cudaErrorInvalidValue;
    }
    const CUmemLocation location{CU_MEM_LOCATION_TYPE_DEVICE, current_device()};
    add(memory, handle, fd, static_cast<std::size_t>(status.st_size), {CU_MEM_ALLOCATION_TYPE_PINNED, type, location});
    return cudaSuccess;
  });
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  return with_memory([&](Memory& memory) {
    const auto at = memory.mapping_around(reinterpret_cast<CUdeviceptr>(address));
    if (at == memory.mapped.end()) return cudaErrorInvalidValue;
    *handle = at->second.handle;
    ++memory.physical[*handle].users;
    return cudaSuccess;
  });
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle) {
  return with_memory([&](Memory& memory) {
    const auto physical = memory.physical.find(handle);
    if (physical == memory.physical.end()) return cudaErrorInvalidValue;
    *properties = physical->second.properties;
    return cudaSuccess;
  });
}

// What is mapped around an address, or what cudaMalloc has given.
CUresult cuMemGetAddressRange(CUdeviceptr* base, std::size_t* nbytes, CUdeviceptr address) {
  return with_memory([&](Memory& memory) {
    Range range{};
    const auto at = memory.mapping_around(address);
    if (at != memory.mapped.end())
      range = {at->first, at->second.nbytes, at->second.id};
    else if (!find_allocation(address, range))
      return cudaErrorInvalidValue;
    *base = range.base;
    *nbytes = range.nbytes;
    return cudaSuccess;
  });
}
// Of virtual memory, the range is the one that is reserved, as that of a real driver.
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute* attributes, void** values, CUdeviceptr address) {
  return with_memory([&](Memory& memory) {
    Range range{};
    const auto at = memory.mapping_around(address);
    if (at != memory.mapped.end()) {
      const auto reserved = Memory::find(memory.reserved, address);
      range = {reserved->first, reserved->second, at->second.id};
    }
    const int legacy = at == memory.mapped.end() && find_allocation(address, range);
    for (unsigned i = 0; i < count; ++i) {
      switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_BUFFER_ID:
          std::memcpy(values[i], &range.id, sizeof range.id);
          break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
          std::memcpy(values[i], &legacy, sizeof legacy);
          break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
          std::memcpy(values[i], &range.base, sizeof range.base);
          break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
          std::memcpy(values[i], &range.nbytes, sizeof range.nbytes);
      }
    }
    return cudaSuccess;
  });
}
