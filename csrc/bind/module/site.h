// The place in the user's Python code that a call comes from.
#pragma once

namespace ringcomm {

// Returns the place of this thread's innermost frame that is in neither this package nor torch, such as "train.py:88",
// relative to the working directory if it is below that; empty if there is none. Needs the GIL; takes about 0.1 us per
// frame. The text is never freed.
const char* python_site();

// Sets the sources of runtime/observe/site.h, for callers without the GIL, and of runtime/interrupt.h, which runs
// signal handlers: an exception that they raise stays with the thread, and takes precedence over the error of the call
// that it ends.
void serve_python_threads();

}  // namespace ringcomm
