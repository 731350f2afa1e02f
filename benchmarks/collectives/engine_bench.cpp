// The cpu engine from C++, without Python: for comparison with libraries that are timed from C.
//
//   engine_bench NAME WORLD_SIZE BATCHES MIN_BYTES MAX_BYTES OP,OP,... [visible] [pin] [dtype]
//
// One JSON line per (op, bytes) from rank 0. "us" has one value per batch: the median time of a call in it, of the
// slowest rank; "mean" likewise the mean. bytes: all_reduce, broadcast, sendrecv: the buffer; reduce_scatter,
// all_to_all: the input; all_gather: the output. sendrecv is half a round trip between ranks 0 and 1. The buffers are
// private, page-touched heap memory, or with `visible` memory of Engine::allocate. `pin` binds rank i to core i mod
// cores, as MPI launchers do by default.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <sstream>

#include "../tests/cpp/ranks.h"

namespace {

using namespace ringcomm;
using Clock = std::chrono::steady_clock;

struct Settings {
  std::string name;
  int world_size, batches;
  std::size_t least, most;
  std::vector<std::string> ops;
  bool visible = false, pin = false;
  DType dtype = DType::kFloat32;
};

class Bench {
 public:
  Bench(Engine& engine, const Settings& settings) : engine_(engine), settings_(settings), a_(buffer()), b_(buffer()) {}

  void run() {
    for (const std::string& op : settings_.ops)
      for (std::size_t bytes = settings_.least; bytes <= settings_.most; bytes *= 4) {
        measure(op, bytes);
        if (op == "barrier") break;
      }
  }

 private:
  char* buffer() {
    void* data = settings_.visible ? engine_.allocate(settings_.most)
                                   : std::aligned_alloc(4096, (settings_.most + 4095) / 4096 * 4096);
    std::memset(data, 0, settings_.most);
    return static_cast<char*>(data);
  }

  void once(const std::string& op, std::size_t bytes) {
    const std::size_t count = bytes / element_bytes(settings_.dtype), part = count / engine_.world_size();
    Call call;
    call.dtype = settings_.dtype;
    call.input = call.output = a_;
    call.count = count;
    if (op == "all_reduce")
      call.op = Op::kAllReduce;
    else if (op == "broadcast")
      call.op = Op::kBroadcast;
    else if (op == "reduce_scatter")
      call.op = Op::kReduceScatter, call.output = b_, call.count = part;
    else if (op == "all_gather")
      call.op = Op::kAllGather, call.input = b_, call.count = part;
    else if (op == "all_to_all")
      call.op = Op::kAllToAll, call.output = b_, call.count = part;
    else if (op == "barrier")
      call.op = Op::kBarrier, call.count = 0;
    else if (op == "sendrecv")
      return ping_pong(call);
    else
      fail(ErrorCode::kInvalid, "unknown op ", op);
    engine_.run(call);
  }
  void ping_pong(Call& call) {
    if (engine_.rank() > 1) return;
    call.root = 1 - engine_.rank();
    call.output = b_;
    for (int half = 0; half < 2; ++half) {
      call.op = half == engine_.rank() ? Op::kSend : Op::kRecv;
      engine_.run(call);
    }
  }

  double worst(double value) {
    Call call;
    call.op = Op::kAllReduce;
    call.dtype = DType::kFloat64;
    call.reduce_op = ReduceOp::kMax;
    call.input = call.output = &value;
    call.count = 1;
    engine_.run(call);
    return value;
  }

  std::pair<double, double> batch(const std::string& op, std::size_t bytes, int inner) {  // median, mean; seconds
    std::vector<double> times;
    worst(0);
    once(op, bytes);
    const auto begin = Clock::now();
    auto last = begin;
    for (int i = 0; i < inner; ++i) {
      once(op, bytes);
      const auto now = Clock::now();
      times.push_back(std::chrono::duration<double>(now - last).count());
      last = now;
    }
    std::sort(times.begin(), times.end());
    const double half = op == "sendrecv" ? 2 : 1;
    const double median = (times[inner / 2] + times[(inner - 1) / 2]) / 2 / half;
    return {worst(median), worst(std::chrono::duration<double>(last - begin).count() / inner / half)};
  }

  void measure(const std::string& op, std::size_t bytes) {
    batch(op, bytes, 1);
    const double estimate = batch(op, bytes, 3).first;
    const int inner = estimate > 10e-3 ? 1 : std::min(5000, static_cast<int>(10e-3 / estimate) + 1);
    std::ostringstream us, mean;
    for (int i = 0; i < settings_.batches; ++i) {
      const auto [m, a] = batch(op, bytes, inner);
      us << (i ? "," : "") << m * 1e6;
      mean << (i ? "," : "") << a * 1e6;
    }
    if (engine_.rank() != 0) return;
    std::printf(
        "{\"peer\":\"%s\",\"world\":%d,\"op\":\"%s\",\"dtype\":\"%s\",\"bytes\":%zu,\"us\":[%s],\"mean\":[%s]}\n",
        settings_.name.c_str(), engine_.world_size(), op.c_str(), name(settings_.dtype),
        op == "barrier" ? std::size_t{0} : bytes, us.str().c_str(), mean.str().c_str());
    std::fflush(stdout);
  }

  Engine& engine_;
  const Settings& settings_;
  char *a_, *b_;
};

void pin_to(int rank) {
  cpu_set_t allowed, one;
  sched_getaffinity(0, sizeof allowed, &allowed);
  int skip = rank % CPU_COUNT(&allowed), core = 0;
  while (!CPU_ISSET(core, &allowed) || skip-- > 0) ++core;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  sched_setaffinity(0, sizeof one, &one);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 7) {
    std::fprintf(stderr,
                 "usage: engine_bench NAME WORLD_SIZE BATCHES MIN_BYTES MAX_BYTES OP,OP,... [visible] [pin] [dtype]\n");
    return 2;
  }
  Settings settings{argv[1],
                    std::atoi(argv[2]),
                    std::atoi(argv[3]),
                    std::strtoull(argv[4], nullptr, 0),
                    std::strtoull(argv[5], nullptr, 0),
                    {}};
  std::istringstream ops(argv[6]);
  for (std::string op; std::getline(ops, op, ',');) settings.ops.push_back(op);
  for (int i = 7; i < argc; ++i) {
    settings.pin = settings.pin || !std::strcmp(argv[i], "pin");
    settings.visible = settings.visible || !std::strcmp(argv[i], "visible");
    for (int d = 0; d <= static_cast<int>(DType::kBool); ++d)
      if (!std::strcmp(argv[i], name(static_cast<DType>(d)))) settings.dtype = static_cast<DType>(d);
  }
  test::run_processes(settings.world_size, [&](Engine& engine) {
    if (settings.pin) pin_to(engine.rank());
    Bench(engine, settings).run();
  });
}
