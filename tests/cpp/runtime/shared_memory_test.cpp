// Shared memory has no pages until they are touched, or mapped at once.
#include "runtime/shared_memory.h"

#include <sys/mman.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdlib>

#include "cpp/ranks.h"

namespace ringcomm::test {
namespace {

// The number of a segment's pages that exist.
std::size_t count_pages(const SharedMemory& memory) {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> exists(memory.nbytes() / page);
  require(mincore(memory.data(), memory.nbytes(), exists.data()) == 0, "the system tells which pages there are");
  std::size_t count = 0;
  for (const unsigned char each : exists) count += each & 1;
  return count;
}

bool maps_at_once() {  // Linux 5.14
  utsname system;
  uname(&system);
  char* rest = nullptr;
  const long major = std::strtol(system.release, &rest, 10), minor = std::strtol(rest + 1, nullptr, 10);
  return major > 5 || (major == 5 && minor >= 14);
}

void pages_come_at_once() {
  const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  const SharedMemory memory = SharedMemory::create("ringcomm-test", 64 * page);
  require(count_pages(memory) == 0, "a new segment has no pages");
  map_pages(memory.data() + 100, 10 * page, true);
  if (maps_at_once()) require(count_pages(memory) == 9, "the pages that lie in the range, no others");
  map_pages(memory.data() + 100, 10, true);
  require(count_pages(memory) <= 9, "a range within a page has none");
  map_pages(memory.data(), memory.nbytes(), false);
  if (maps_at_once()) require(count_pages(memory) == 64, "pages that are read exist, too");
  for (std::size_t i = 0; i < memory.nbytes(); ++i) require(memory.data()[i] == 0, "they are zero");
}

}  // namespace
}  // namespace ringcomm::test

int main() {
  ringcomm::test::pages_come_at_once();
  std::printf("runtime_shared_memory_test passed\n");
}
