// Where in the user's Python a call comes from.
#pragma once

namespace ringcomm {

// The innermost frame of this thread that is neither this package's nor torch's, such as "train.py:88", relative to the
// working directory where it lies there; empty without one. With the GIL; costs about 0.1 us a frame. The text lives
// as long as the process.
const char* python_site();

// Tells whoever asks without the GIL, through core/site.h; and runs the handlers of signals through core/interrupt.h:
// what they raise stays with the thread, and goes before the error of the call that ends for it.
void serve_python_threads();

}  // namespace ringcomm
