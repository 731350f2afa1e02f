#include "cpu/group/process.h"

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>

#include "core/error.h"

namespace ringcomm::cpu {

namespace {

#if defined(SYS_pidfd_open)
int open_handle(int pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
#else
int open_handle(int) { return -1; }
#endif

}  // namespace

std::shared_ptr<const Process> Process::of(int pid) {
  static std::mutex mutex;
  static auto* const known = new std::map<int, std::weak_ptr<const Process>>;  // never destroyed
  const std::lock_guard<std::mutex> lock(mutex);
  std::weak_ptr<const Process>& entry = (*known)[pid];
  std::shared_ptr<const Process> process = entry.lock();
  if (process && !process->exited()) return process;  // else the number may belong to another process
  process.reset(new Process(pid));
  for (auto it = known->begin(); it != known->end();)
    it = it->second.expired() && it->first != pid ? known->erase(it) : std::next(it);
  (*known)[pid] = process;
  return process;
}

Process::Process(int pid) : pid_(pid), handle_(open_handle(pid)) {}

Process::~Process() {
  if (handle_ >= 0) close(handle_);
}

bool Process::exited() const {
  if (handle_ >= 0) {
    pollfd each{handle_, POLLIN, 0};
    return poll(&each, 1, 0) == 1 && (each.revents & POLLIN) != 0;
  }
  const char now = state();
  return (now == 0 && kill(pid_, 0) != 0 && errno == ESRCH) || now == 'Z' || now == 'X';
}

char Process::state() const {
  std::ifstream file(concat("/proc/", pid_, "/stat"));
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t end = text.rfind(')');  // of the process name, which may contain any character
  return end == std::string::npos || end + 2 >= text.size() ? '\0' : text[end + 2];
}

}  // namespace ringcomm::cpu
