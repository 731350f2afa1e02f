// Every collective of the cpu engine against a scalar reference, bit for bit, with ranks as threads and as processes:
//   cpu_engine_test [quick] [world sizes]
// Runs plain and under ASan, UBSan and TSan (TSan: threads only, since it does not see across processes).
#include "cpp/engine_matrix.h"

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  alarm(280);  // a hang ends the program
  const bool quick = argc > 1 && !std::strcmp(argv[1], "quick");
  std::vector<int> worlds;
  for (int i = quick ? 2 : 1; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {1, 2, 3, 5, 8};
  for (int w : worlds) {
    run_threads(w, [&](ringcomm::Engine& e) { matrix(e, quick); });
    if (kProcesses) run_processes(w, [&](ringcomm::Engine& e) { matrix(e, quick); });
    std::printf("W=%d: ok, %ld comparisons here\n", w, cells.load());
    std::fflush(stdout);
  }
  ringcomm::EngineOptions small = short_timeout();
  small.slot_bytes = 4096;
  for (int w : {2, 3, 5}) run_threads(w, many_windows, small);
  std::printf("cpu_engine_test passed\n");
}
