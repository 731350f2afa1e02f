#include "runtime/identity.h"

#include <unistd.h>

#include <fstream>
#include <mutex>
#include <random>

#include "core/error.h"

namespace ringcomm {

std::uint64_t random_number() {
  std::random_device device;
  return static_cast<std::uint64_t>(device()) << 32 | device();
}

std::uint64_t process_number() {
  static std::mutex mutex;
  static std::uint64_t number = 0;
  static pid_t owner = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  if (owner != getpid()) {
    owner = getpid();
    number = random_number();
  }
  return number;
}

std::string machine_identity(std::initializer_list<const char*> namespaces) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string identity;
  std::getline(file, identity);
  for (const char* const kind : namespaces) {
    char space[64] = {};
    const bool known = readlink(concat("/proc/self/ns/", kind).c_str(), space, sizeof space - 1) > 0;
    identity += concat('/', known ? space : "?");
  }
  return identity;
}

}  // namespace ringcomm
