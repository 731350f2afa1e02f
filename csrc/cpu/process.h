// Other processes of this host: whether they are alive.
#pragma once

#include <memory>
#include <string>

namespace ringcomm::cpu {

class Process {
 public:
  // One object for all who ask for the same process; the process must be alive.
  static std::shared_ptr<const Process> of(int pid);
  ~Process();
  Process(const Process&) = delete;

  int pid() const { return pid_; }
  // A process that has ended but was not yet waited for by its parent has exited too.
  bool exited() const;
  // Stopped by a signal or a debugger.
  bool stopped() const { return state() == 'T' || state() == 't'; }

 private:
  explicit Process(int pid);
  char state() const;  // as in /proc/<pid>/stat; 0 if there is none

  const int pid_;
  const int handle_;  // becomes readable as the process exits; -1: the kernel is older than 5.3 or refuses
};

}  // namespace ringcomm::cpu
