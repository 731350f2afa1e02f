#include "runtime/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "core/error.h"

namespace ringcomm {

namespace {

char* map(int fd, std::size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED)
    fail(ErrorCode::kSystem, "mapping ", nbytes, " bytes of shared memory failed: ", std::strerror(errno));
  madvise(data, nbytes, MADV_HUGEPAGE);  // optional; small pages work too
  return static_cast<char*>(data);
}

}  // namespace

void map_pages(const void* begin, std::size_t nbytes, bool for_writing) {
  constexpr int kPopulateRead = 22, kPopulateWrite = 23;  // older headers lack the names
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = (reinterpret_cast<std::uintptr_t>(begin) + page - 1) / page * page;
  const auto last = (reinterpret_cast<std::uintptr_t>(begin) + nbytes) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, for_writing ? kPopulateWrite : kPopulateRead);
}

SharedMemory::~SharedMemory() {
  if (data_) munmap(data_, nbytes_);
  close_fd();
}

SharedMemory SharedMemory::create(const char* label, std::size_t nbytes) {
  SharedMemory memory;
  memory.fd_ = memfd_create(label, MFD_CLOEXEC);
  if (memory.fd_ < 0)
    fail(ErrorCode::kSystem, "memfd_create failed: ", std::strerror(errno),
         "; the cpu engine needs Linux 3.17 or newer");
  if (ftruncate(memory.fd_, static_cast<off_t>(nbytes)) != 0)
    fail(ErrorCode::kSystem, "shared memory of ", nbytes, " bytes was refused: ", std::strerror(errno));
  memory.nbytes_ = nbytes;
  memory.data_ = map(memory.fd_, nbytes);
  return memory;
}

SharedMemory SharedMemory::open(int pid, int fd, std::size_t nbytes) {
  const std::string path = concat("/proc/", pid, "/fd/", fd);
  SharedMemory memory;
  memory.fd_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK);
  if (memory.fd_ < 0)
    fail(ErrorCode::kSystem, "opening the shared memory of process ", pid, " failed: ", std::strerror(errno),
         "; all ranks must run under one user in one PID namespace, and still be alive");
  struct stat info;
  if (fstat(memory.fd_, &info) != 0 || !S_ISREG(info.st_mode) || static_cast<std::size_t>(info.st_size) < nbytes)
    fail(ErrorCode::kSystem, "file descriptor ", fd, " of process ", pid,
         " is not the announced shared memory; its process may have been replaced");
  memory.nbytes_ = nbytes;
  memory.data_ = map(memory.fd_, nbytes);
  memory.close_fd();
  return memory;
}

void SharedMemory::close_fd() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void SharedMemory::become(SharedMemory other) {
  void* const data = mremap(other.data_, nbytes_, nbytes_, MREMAP_MAYMOVE | MREMAP_FIXED, data_);
  if (data == MAP_FAILED)
    fail(ErrorCode::kSystem, "moving ", nbytes_, " bytes of shared memory failed: ", std::strerror(errno));
  other.data_ = nullptr;
  std::swap(fd_, other.fd_);
}

void SharedMemory::discard(std::size_t offset, std::size_t nbytes) {
  fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(nbytes));
}

void SharedMemory::swap(SharedMemory& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  std::swap(fd_, other.fd_);
}

}  // namespace ringcomm
