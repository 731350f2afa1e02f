// Shared memory without a name. A segment is an anonymous memory file (memfd) that peers open through
// /proc/<pid>/fd/<fd>. So a process that ends leaves nothing in /dev/shm, the size limit of /dev/shm does not apply,
// and only processes of the same user can open a segment.
#pragma once

#include <cstddef>

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

  // Returns zeroed memory; the system provides pages when they are first touched.
  static SharedMemory create(const char* label, std::size_t nbytes);
  // Maps `nbytes` of another process's (or this one's) segment.
  static SharedMemory open(int pid, int fd, std::size_t nbytes);

  char* data() const { return data_; }
  std::size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }
  // Keeps the mapping; no other process can open the segment any more.
  void close_fd();
  // Replaces the content by another segment of the same size; the address stays.
  void become(SharedMemory other);
  // Returns the pages of a range to the system; they read as zeros afterwards.
  void discard(std::size_t offset, std::size_t nbytes);

 private:
  void swap(SharedMemory& other) noexcept;

  char* data_ = nullptr;
  std::size_t nbytes_ = 0;
  int fd_ = -1;
};

// Maps a range of shared memory at once, if Linux can (5.14 or newer). Otherwise, or if memory is short, each page
// costs a fault at the first access in every process.
void map_pages(const void* begin, std::size_t nbytes, bool for_writing);

}  // namespace ringcomm
