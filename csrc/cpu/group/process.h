// Processes of this host, and whether they are alive.
#pragma once

#include <memory>

namespace ringcomm::cpu {

class Process {
 public:
  // Returns the one object for a process, which must be alive.
  static std::shared_ptr<const Process> of(int pid);
  ~Process();
  Process(const Process&) = delete;

  // Also true for a process that has ended but has not been reaped by its parent.
  bool exited() const;
  // Whether the process is stopped by a signal or a debugger.
  bool stopped() const { return state() == 'T' || state() == 't'; }

 private:
  explicit Process(int pid);
  char state() const;  // as in /proc/<pid>/stat; 0 if there is no such process

  const int pid_;
  const int handle_;  // readable once the process has exited; -1: the kernel is older than 5.3 or refuses
};

}  // namespace ringcomm::cpu
