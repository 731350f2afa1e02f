// Ctrl-C, and whatever else the user's language makes of a signal, while a call waits.
#pragma once

namespace ringcomm {

struct InterruptSource {
  // Whether handlers of signals run in this thread.
  bool (*handles)();
  // Lets the handlers of signals run that came to this thread; true: one of them wants the call to end, by an exception
  // that is raised where the call was made.
  bool (*handle)();
};
// Set by the floor that knows the user's language; `source` lives for ever.
void set_interrupt_source(const InterruptSource* source);
bool interruptible();
// For every wait to ask now and then.
bool interrupted();

}  // namespace ringcomm
