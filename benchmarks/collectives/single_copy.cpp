// Would a single copy through the kernel pay? Rank 1 takes a message from rank 0's private memory, by
// process_vm_readv and by the engine's send/recv, in turns.
//
//   single_copy [rounds]          a Markdown table: us per message, median (min-max), and the ratio
#include <sys/prctl.h>
#include <sys/uio.h>

#include <algorithm>
#include <chrono>

#include "../tests/cpp/ranks.h"

namespace {

using namespace ringcomm;
using Clock = std::chrono::steady_clock;

struct Samples {
  std::vector<double> us;

  double median() {
    std::sort(us.begin(), us.end());
    return us[us.size() / 2];
  }
};

class Bench {
 public:
  Bench(Engine& engine, int rounds) : engine_(engine), rounds_(rounds), data_(kMost) {}

  void run() {
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
    struct {
      std::int64_t pid, address;
    } source{getpid(), reinterpret_cast<std::int64_t>(data_.data())};
    Call call;
    call.op = Op::kBroadcast;
    call.dtype = DType::kInt64;
    call.input = call.output = &source;
    call.count = 2;
    engine_.run(call);
    pid_ = static_cast<pid_t>(source.pid);
    address_ = reinterpret_cast<void*>(source.address);
    if (engine_.rank() == 1)
      std::printf("| bytes | process_vm_readv us | send/recv us | readv / send-recv |\n|---|---|---|---|\n");
    for (std::size_t nbytes = 16 << 10; nbytes <= kMost; nbytes *= 4) measure(nbytes);
  }

 private:
  static constexpr std::size_t kMost = 64u << 20;

  void barrier() { engine_.run(Call{}); }

  // The message is written anew each time, as a message is.
  double kernel_copy(std::size_t nbytes) {
    if (engine_.rank() == 0) std::memset(data_.data(), 1, nbytes);
    barrier();
    const auto begin = Clock::now();
    if (engine_.rank() == 1) {
      const iovec to{data_.data(), nbytes}, from{address_, nbytes};
      if (process_vm_readv(pid_, &to, 1, &from, 1, 0) != static_cast<ssize_t>(nbytes))
        fail(ErrorCode::kSystem, "process_vm_readv is not permitted here");
    }
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    barrier();
    return us;
  }
  double message(std::size_t nbytes) {
    if (engine_.rank() == 0) std::memset(data_.data(), 1, nbytes);
    barrier();
    const auto begin = Clock::now();
    Call call;
    call.op = engine_.rank() == 0 ? Op::kSend : Op::kRecv;
    call.root = 1 - engine_.rank();
    call.input = call.output = data_.data();
    call.count = nbytes;
    if (engine_.rank() < 2) engine_.run(call);
    const double us = std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
    barrier();
    return us;
  }

  void measure(std::size_t nbytes) {
    Samples kernel, board;
    for (int i = 0; i < rounds_ + 3; ++i) {
      const double a = kernel_copy(nbytes), b = message(nbytes);
      if (i < 3) continue;
      kernel.us.push_back(a);
      board.us.push_back(b);
    }
    if (engine_.rank() != 1) return;
    const double k = kernel.median(), b = board.median();
    std::printf("| %zu | %.1f (%.1f-%.1f) | %.1f (%.1f-%.1f) | %.2f |\n", nbytes, k, kernel.us.front(),
                kernel.us.back(), b, board.us.front(), board.us.back(), k / b);
  }

  Engine& engine_;
  const int rounds_;
  std::vector<char> data_;
  pid_t pid_ = 0;
  void* address_ = nullptr;
};

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 51;
  ringcomm::test::run_processes(2, [&](ringcomm::Engine& engine) { Bench(engine, rounds).run(); });
}
