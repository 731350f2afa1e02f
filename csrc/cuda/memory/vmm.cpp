#include "cuda/memory/vmm.h"

#if !defined(RINGCOMM_EMULATE)
#include <cuda.h>
#endif
#include <fcntl.h>
#include <unistd.h>

#include "core/error.h"
#include "core/types.h"
#include "cuda/runtime.h"

namespace ringcomm::cuda {

namespace {

#define RINGCOMM_DRIVER_FUNCTIONS(X)               \
  X(get_error_string, cuGetErrorString)            \
  X(device_get_attribute, cuDeviceGetAttribute)    \
  X(granularity, cuMemGetAllocationGranularity)    \
  X(create, cuMemCreate)                           \
  X(release, cuMemRelease)                         \
  X(reserve, cuMemAddressReserve)                  \
  X(free_address, cuMemAddressFree)                \
  X(map, cuMemMap)                                 \
  X(unmap, cuMemUnmap)                             \
  X(set_access, cuMemSetAccess)                    \
  X(get_access, cuMemGetAccess)                    \
  X(export_handle, cuMemExportToShareableHandle)   \
  X(import_handle, cuMemImportFromShareableHandle) \
  X(retain, cuMemRetainAllocationHandle)           \
  X(properties, cuMemGetAllocationPropertiesFromHandle)

constexpr auto kFabric = static_cast<CUmemAllocationHandleType>(8);  // by number: unknown to toolkits before 12.3

// The driver's functions, by the versions that they had in CUDA 12.0.
struct Driver {
#define RINGCOMM_LOOK_UP(name, function) decltype(&function) name = RINGCOMM_DRIVER(function);
  RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_LOOK_UP)
#undef RINGCOMM_LOOK_UP
  bool complete = true;
  const int pid = getpid();

  Driver() {
#define RINGCOMM_IS_THERE(name, function) complete = complete && name;
    RINGCOMM_DRIVER_FUNCTIONS(RINGCOMM_IS_THERE)
#undef RINGCOMM_IS_THERE
  }
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  // For destructors: the driver does not survive a fork, nor the end of the process.
  bool may_release() const { return pid == getpid() && !process_is_ending(); }

  void check(CUresult status, const char* what, int rank) const {
    if (status == CUDA_SUCCESS) return;
    const char* text = nullptr;
    get_error_string(status, &text);
    fail(ErrorCode::kSystem, what, ": rank ", rank, " expected success, got ", text ? text : "an unknown error", " (",
         static_cast<int>(status), "); free memory, or set RINGCOMM_CUDA_HANDLES=ipc to do without this call");
  }
};

CUmemAllocationProp properties_of(int device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {};
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return properties;
}

CUdeviceptr address_of(const VmmRange& range) { return reinterpret_cast<CUdeviceptr>(range.data); }

// Maps an allocation at some address. Takes the allocation over, also when it fails.
VmmRange map(CUmemGenericAllocationHandle allocation, std::size_t nbytes, int device, int rank) {
  const Driver& driver = Driver::get();
  VmmRange range{nullptr, nbytes, allocation};
  CUdeviceptr address = 0;
  bool mapped = false;
  try {
    driver.check(driver.reserve(&address, nbytes, 0, 0, 0), "cuMemAddressReserve", rank);
    driver.check(driver.map(address, nbytes, 0, allocation, 0), "cuMemMap", rank);
    mapped = true;
    range.data = reinterpret_cast<char*>(address);
    vmm_grant(range, device, rank);
  } catch (...) {
    if (mapped) driver.unmap(address, nbytes);
    if (address) driver.free_address(address, nbytes);
    driver.release(allocation);
    throw;
  }
  return range;
}

}  // namespace

std::string why_no_vmm(int device) {
  const Driver& driver = Driver::get();
  if (!driver.complete) return "the driver lacks the virtual memory functions";
  int supported = 0;
  if (driver.device_get_attribute(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
                                  device) != CUDA_SUCCESS ||
      !supported)
    return "the device cannot export memory as a file descriptor";
  return "";
}

VmmRange vmm_create(int device, std::size_t nbytes, int rank) {
  const Driver& driver = Driver::get();
  const CUmemAllocationProp properties = properties_of(device);
  std::size_t granularity = 0;
  driver.check(driver.granularity(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
               "cuMemGetAllocationGranularity", rank);
  const std::size_t rounded = round_up(nbytes, granularity);
  CUmemGenericAllocationHandle allocation = 0;
  driver.check(driver.create(&allocation, rounded, &properties, 0), "cuMemCreate", rank);
  return map(allocation, rounded, device, rank);
}

int vmm_export(std::uint64_t allocation, int rank) {
  const Driver& driver = Driver::get();
  int fd = -1;
  driver.check(driver.export_handle(&fd, allocation, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle", rank);
  fcntl(fd, F_SETFD, FD_CLOEXEC);
  return fd;
}

VmmRange vmm_open(int fd, std::size_t nbytes, int device, int rank) {
  const Driver& driver = Driver::get();
  if (!driver.complete)
    fail(ErrorCode::kUnsupported, "connect: rank ", rank, " expected a driver with virtual memory functions, since a ",
         "peer's memory needs them, got none; update the driver");
  CUmemGenericAllocationHandle allocation = 0;
  driver.check(driver.import_handle(&allocation, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle", rank);
  return map(allocation, nbytes, device, rank);
}

void vmm_grant(const VmmRange& range, int device, int rank) {
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const Driver& driver = Driver::get();
  driver.check(driver.set_access(address_of(range), range.nbytes, &access, 1), "cuMemSetAccess", rank);
}

void vmm_release(VmmRange& range) noexcept {
  if (!range.data) return;
  const Driver& driver = Driver::get();
  driver.unmap(address_of(range), range.nbytes);
  driver.free_address(address_of(range), range.nbytes);
  driver.release(range.allocation);
  range = {};
}

// ---- memory that others have mapped ---------------------------------------------------------------------------------

std::shared_ptr<const VmmReference> VmmReference::find(std::uint64_t address) {
  const Driver& driver = Driver::get();
  CUmemGenericAllocationHandle allocation = 0;
  if (!driver.complete || driver.retain(&allocation, reinterpret_cast<void*>(address)) != CUDA_SUCCESS) return nullptr;
  return std::make_shared<const VmmReference>(allocation);
}

VmmReference::~VmmReference() {
  if (Driver::get().may_release()) Driver::get().release(number_);
}

HandleKind VmmReference::handle_kind(int device) const {
  CUmemAllocationProp properties{};
  if (Driver::get().properties(&properties, number_) != CUDA_SUCCESS ||
      properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE || properties.location.id != device)
    return HandleKind::kPrivate;
  const int types = properties.requestedHandleTypes;
  return types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? HandleKind::kVmm
         : types & kFabric                                ? HandleKind::kFabric
                                                          : HandleKind::kPrivate;
}

bool VmmReference::export_fabric(void* to) const {
  return Driver::get().export_handle(to, number_, kFabric, 0) == CUDA_SUCCESS;
}

bool vmm_is_granted(std::uint64_t address, int device) {
  const Driver& driver = Driver::get();
  unsigned long long flags = 0;
  CUmemLocation location{};
  location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  location.id = device;
  return driver.complete && driver.get_access(&flags, &location, address) == CUDA_SUCCESS &&
         flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

VmmWindow::VmmWindow(std::size_t nbytes, int rank) : nbytes_(nbytes) {
  const Driver& driver = Driver::get();
  if (!driver.complete)
    fail(ErrorCode::kUnsupported, "communicator: rank ", rank,
         " expected a driver with virtual memory functions, since ",
         "a peer's memory needs them, got none; update the driver");
  CUdeviceptr address = 0;
  driver.check(driver.reserve(&address, nbytes, 0, 0, 0), "cuMemAddressReserve", rank);
  data_ = reinterpret_cast<char*>(address);
}

VmmWindow::~VmmWindow() {
  if (Driver::get().may_release()) Driver::get().free_address(reinterpret_cast<CUdeviceptr>(data_), nbytes_);
}

std::shared_ptr<void> VmmWindow::map(const std::shared_ptr<VmmWindow>& window, std::size_t offset, std::size_t nbytes,
                                     int fd, const void* fabric, int device, int rank) {
  const Driver& driver = Driver::get();
  CUmemGenericAllocationHandle allocation = 0;
  const CUresult imported =
      fabric ? driver.import_handle(&allocation, const_cast<void*>(fabric), kFabric)
             : driver.import_handle(&allocation, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  driver.check(imported, "cuMemImportFromShareableHandle", rank);
  const VmmRange range{window->data_ + offset, nbytes, allocation};
  const CUresult status = driver.map(address_of(range), nbytes, 0, allocation, 0);
  driver.release(allocation);  // the mapping keeps it
  driver.check(status, "cuMemMap", rank);
  const std::shared_ptr<void> mapped(range.data, [window, nbytes](void* data) {
    if (Driver::get().may_release()) Driver::get().unmap(reinterpret_cast<CUdeviceptr>(data), nbytes);
  });
  vmm_grant(range, device, rank);
  return mapped;
}

}  // namespace ringcomm::cuda
