// Shared memory without a name. A segment is an anonymous memory file (memfd) that peers open through
// /proc/<pid>/fd/<fd>, so nothing can be left behind in /dev/shm by any exit, its size limit does not apply, and only
// processes of the same user can open it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace ringcomm {

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept { swap(other); }
  SharedMemory& operator=(SharedMemory&& other) noexcept {
    swap(other);
    return *this;
  }
  ~SharedMemory();

  // Zeroed memory; pages are taken from the machine as they are touched.
  static SharedMemory create(const char* label, std::size_t nbytes);
  // Maps `nbytes` of another process's (or this one's) segment.
  static SharedMemory open(int pid, int fd, std::size_t nbytes);

  char* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }
  // The mapping stays; nobody can open the segment any more.
  void close_fd();
  // Takes the place of another one, of the same size, at its own addresses.
  void become(SharedMemory other);
  // Gives the pages of a range back; they read as zeros afterwards.
  void discard(std::size_t offset, std::size_t nbytes);

 private:
  void swap(SharedMemory& other) noexcept;

  char* data_ = nullptr;
  std::size_t nbytes_ = 0;
  int fd_ = -1;
};

}  // namespace ringcomm
