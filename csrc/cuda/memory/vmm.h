// Device memory of the driver's virtual memory functions: passed to other processes as a file descriptor, mapped at a
// free address, with access for single devices. The entry points are looked up at run time, so that nothing links to
// the driver.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace ringcomm::cuda {

// How memory is passed to other processes. kPrivate: not at all. kVmm: a file descriptor goes with the handle. kFabric:
// only for memory of the user, see Buffers; the driver's handle takes the place of the IPC handle.
enum class HandleKind : std::uint32_t { kPrivate, kIpc, kVmm, kFabric };

struct VmmRange {
  char* data = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t allocation = 0;
};

// Empty, or the reason why `device` does not support it.
std::string why_no_vmm(int device);

VmmRange vmm_create(int device, std::size_t nbytes, int rank);
int vmm_export(std::uint64_t allocation, int rank);
VmmRange vmm_open(int fd, std::size_t nbytes, int device, int rank);
void vmm_grant(const VmmRange& range, int device, int rank);
void vmm_release(VmmRange& range) noexcept;

// ---- memory that others have mapped, such as torch's expandable segments --------------------------------------------

inline constexpr std::size_t kFabricBytes = 64;

// The physical memory that is mapped at an address. While this object lives, no other memory gets its number.
class VmmReference {
 public:
  // Null: nothing is mapped there by these functions.
  static std::shared_ptr<const VmmReference> find(std::uint64_t address);
  explicit VmmReference(std::uint64_t number) : number_(number) {}
  ~VmmReference();
  VmmReference(const VmmReference&) = delete;
  VmmReference& operator=(const VmmReference&) = delete;

  std::uint64_t number() const { return number_; }  // its handle
  // kPrivate too if it does not lie on `device`.
  HandleKind handle_kind(int device) const;
  // kFabric: writes kFabricBytes, a handle that is valid in every process.
  bool export_fabric(void* to) const;

 private:
  const std::uint64_t number_;
};
// Whether `device` may use what is mapped at an address of this process.
bool vmm_is_granted(std::uint64_t address, int device);

// An address range into which physical memory of a peer is mapped, at the offsets that it has there.
class VmmWindow {
 public:
  VmmWindow(std::size_t nbytes, int rank);
  ~VmmWindow();
  VmmWindow(const VmmWindow&) = delete;
  VmmWindow& operator=(const VmmWindow&) = delete;

  char* data() const { return data_; }
  // Maps the memory of `fd`, or else of `fabric`, for use on `device`. When the result is destroyed, the memory is
  // unmapped, and then the window is released.
  static std::shared_ptr<void> map(const std::shared_ptr<VmmWindow>& window, std::size_t offset, std::size_t nbytes,
                                   int fd, const void* fabric, int device, int rank);

 private:
  char* data_ = nullptr;
  const std::size_t nbytes_;
};

}  // namespace ringcomm::cuda
