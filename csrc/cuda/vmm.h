// Device memory by the driver's virtual memory functions: passed to other processes as a file descriptor, mapped where
// there is room, granted to single devices. The entry points are looked up at run time, nothing links to the driver.
// In the emulator it is a memory file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringcomm::cuda {

struct VmmRange {
  char* data = nullptr;
  std::size_t nbytes = 0;
  std::uint64_t allocation = 0;
};

// Empty, or why `device` has none of it.
std::string why_no_vmm(int device);

VmmRange vmm_create(int device, std::size_t nbytes, int rank);
int vmm_export(const VmmRange& range, int rank);
VmmRange vmm_open(int fd, std::size_t nbytes, int device, int rank);
void vmm_grant(const VmmRange& range, int device, int rank);
void vmm_release(VmmRange& range) noexcept;

}  // namespace ringcomm::cuda
