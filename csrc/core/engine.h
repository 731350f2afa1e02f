// The interface of every engine: one description of a call, and a few virtual functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/error.h"
#include "core/op.h"
#include "core/sync.h"
#include "core/types.h"

namespace ringcomm {

// One rank's part of a message that need not be contiguous.
struct Part {
  void* data = nullptr;
  std::size_t count = 0;  // elements
};

inline constexpr int kAnySource = -1;

// One call on one rank.
//
//   op              input              output             count
//   all_reduce      count              count              elements of the tensor
//   broadcast       count at the root  count              elements of the tensor (input may be null elsewhere)
//   reduce          count              count at the root  elements of the tensor
//   reduce_scatter  world_size * count count              elements of one rank's part
//   all_gather      count              world_size * count elements of one rank's part
//   gather          count              world_size * count at the root
//   scatter         world_size * count at the root, count
//   all_to_all      world_size * count world_size * count elements of one part
//   send            count              -                  root = the destination
//   recv            -                  count              root = the source, or kAnySource
//   probe           -                  -                  as recv
//   barrier         -                  -                  0
//
// A message of world_size parts may instead be given as `input_parts` / `output_parts`: world_size entries in rank
// order, of `count` elements each in gather and scatter, else possibly uneven. The base pointer and count of that side
// are then ignored, except that the one-part side of an uneven all_gather or reduce_scatter still has the number of its
// own elements in `count`. Every rank passes the same counts, except in all_to_all, where entry p of the input parts of
// rank r has the same count as entry r of the output parts of rank p.
// Input and output may be the same memory (for reduce_scatter: output = this rank's part of input, for all_gather:
// input = this rank's part of output); otherwise they must not overlap.
struct Call {
  Op op = Op::kBarrier;
  DType dtype = DType::kUInt8;
  ReduceOp reduce_op = ReduceOp::kSum;
  Algorithm algorithm = Algorithm::kAuto;
  int root = 0;  // root of a rooted op, peer of a message, or mark (core/call/parts.h), which is equal on all ranks
  int tag = 0;   // messages only; a receive takes the oldest message with its tag from its source
  const void* input = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  double factor = 1.0;  // premul_sum: the factor of this rank's values
  std::vector<Part> input_parts;
  std::vector<Part> output_parts;
  std::int64_t timeout_ms = 0;  // 0: the communicator's
  std::uintptr_t stream = 0;    // device engines: the stream to run on
  const char* site = nullptr;   // place in the user's code, such as "train.py:88"; never freed
};

// A message that has arrived, as `Engine::probe` describes it.
struct MessageInfo {
  int source = -1;
  DType dtype = DType::kUInt8;
  std::size_t nbytes = 0;
};

// An asynchronous call in flight.
class Request {
 public:
  virtual ~Request() = default;
  virtual bool done() const = 0;
  // Blocks until done, and may execute queued calls meanwhile; throws the call's error. With timeout_ms 0 the call's
  // own time limit applies; otherwise throws kTimeout after that many milliseconds, and the call stays in flight.
  virtual void wait(std::int64_t timeout_ms = 0) = 0;
  // Runs `callback` once, with the call's error or null: at once if the call is done, else in the thread that ends it.
  virtual void on_done(std::function<void(std::exception_ptr)> callback) = 0;
  // Source rank of a finished recv.
  virtual int source() const = 0;
  // Tells the engine that a caller waits for the call without `wait`, so that the call begins now if it can. Does not
  // block.
  virtual void start_now() {}
  // Device engines: work enqueued on `stream` from now on runs after the call; blocks the host only until the call
  // itself has been enqueued. On other engines the same as wait().
  virtual void join([[maybe_unused]] std::uintptr_t stream) { wait(); }
};

struct EngineOptions {
  std::int64_t timeout_ms = 30 * 60 * 1000;  // for calls without a limit of their own
  std::size_t slot_bytes = 0;                // staging slot; 0: the engine's choice
  int device = 0;                            // device engines: the index of this rank's device
  int channels = 0;                          // device engines: most blocks of one rank; 0: the engine's choice
};

// Copies the elements of several tensors into one bucket or back: element i of source piece p becomes element i of
// target piece p, times `factor`. Types may differ for floats only; 8-bit floats convert from and to float32 only.
// Values are widened exactly, multiplied in float32 (float64 if either type is), and rounded once.
struct PackCall {
  DType from = DType::kFloat32, to = DType::kFloat32;
  double factor = 1.0;
  struct Piece {
    const void* source;
    void* target;
    std::size_t count;
  };
  std::vector<Piece> pieces;
  std::uintptr_t stream = 0;
};

// Combines two messages: element i of the output is first[i] combined with second[i]; for avg, their sum divided by
// `divisor`. 16- and 8-bit floats are widened, combined and rounded once. The output may be one of the inputs.
struct CombineCall {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  const void* first = nullptr;
  const void* second = nullptr;
  void* output = nullptr;
  std::size_t count = 0;
  int divisor = 1;
  std::uintptr_t stream = 0;
};

// One rank of one communicator. Construct it, pass every rank's `handle()` to every rank's `connect`, then make calls.
// Collectives run in the order of their calls, both synchronous and submitted ones; every rank must make the same calls
// in the same order. Calls may come from any thread.
class Engine {
 public:
  virtual ~Engine() = default;
  virtual const char* kind() const = 0;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  // The index of the device whose memory its calls use; -1: host memory.
  virtual int device() const { return -1; }

  virtual std::string handle() const = 0;
  virtual void connect(const std::vector<std::string>& handles) = 0;

  // Returns the source rank of a recv, else -1.
  virtual int run(const Call& call) = 0;
  virtual std::shared_ptr<Request> submit(Call call) = 0;
  // Describes the message that a recv with this root and tag would take next, and leaves it there. `waits`: until there
  // is one, within the call's time limit; otherwise returns nothing if there is none yet.
  virtual std::optional<MessageInfo> probe(const Call&, bool /*waits*/) {
    fail(ErrorCode::kUnsupported, "probe: rank ", rank(), " expected an engine that can look at messages, got ",
         kind());
  }
  // Runs calls of one op and type, with the effect of one after the other. An engine may merge them, so that a list of
  // tensors needs no copy into one buffer. Sends and receives of one list do not wait for one another.
  virtual void run_list(const std::vector<Call>& calls) {
    std::vector<std::shared_ptr<Request>> messages;
    for (const Call& call : calls) {
      if (call.op == Op::kSend || call.op == Op::kRecv)
        messages.push_back(submit(call));
      else
        run(call);
    }
    for (const auto& message : messages) message->wait();
  }
  // Local operations; they are no calls of the communicator.
  virtual void pack(const PackCall& packing) = 0;
  virtual void combine(const CombineCall& combining) = 0;

  // Memory that the peers read and write in place. `allocate` is local on the cpu engine and among ranks of one
  // process; on devices of several processes it is a collective with the same size on every rank. `release` is local
  // and may come in any order, but not while a call uses the memory.
  virtual void* allocate(std::size_t nbytes) = 0;
  virtual void release(void* data) = 0;

  // Ends every wait on every rank; idempotent, callable from any thread. The first reason is kept: from then on every
  // call on every rank that has learned of the abort throws it, with `code`.
  virtual void abort(const std::string& reason, ErrorCode code = ErrorCode::kAborted) = 0;
  virtual bool aborted() const = 0;
  // The reason given to abort and its code, if this rank knows them.
  virtual std::string why_aborted() const { return {}; }
  virtual ErrorCode aborted_as() const { return ErrorCode::kAborted; }

  // (payload, members, limit_ms) After an abort: the surviving ranks agree which ranks continue, and exchange a payload
  // each. `members`: the ranks that must take part; empty: the ranks that call within `limit_ms`, on which all of them
  // agree. Returns the payloads by rank, empty for the others. Every rank must call it the same number of times. Throws
  // kRankLost if this rank, or one of the members, does not take part.
  virtual std::vector<std::string> agree_on_shrink(const std::string&, const std::vector<int>&,
                                                   std::int64_t /*limit_ms*/) {
    fail(ErrorCode::kUnsupported, "shrink: rank ", rank(), " expected an engine of one host's memory, got ", kind(),
         "; make a new communicator over the ranks that are left");
  }
  virtual void set_timeout(std::int64_t timeout_ms) = 0;
  virtual std::int64_t timeout() const = 0;
  // Finishes queued collectives and sends; open receives end with an error. Local: peers may close later.
  virtual void close() = 0;
  virtual bool closed() const = 0;
  // Whether the caller is a thread of this engine that runs a callback; such a thread must not destroy the engine.
  virtual bool runs_this_thread() const = 0;
  // Facts for diagnostics: (name, value) pairs such as ("isa", "avx512").
  virtual std::vector<std::pair<std::string, std::string>> describe() const = 0;
  // From now on adds the nanoseconds that collectives wait for each peer to `waited`, which has world_size entries; the
  // time that a wait spins first is not counted. Call it before connect. Returns false if the engine does not know for
  // which peer it waits.
  virtual bool count_waits([[maybe_unused]] std::shared_ptr<Flag> waited) { return false; }
  // From now on counts collectives by the algorithm that the engine chooses; see core/algorithm_counts.h. Call it
  // before connect.
  virtual void count_algorithms([[maybe_unused]] std::shared_ptr<Flag> counts) {}
  // Device engines: blocks the host until all work enqueued on `stream` is done; throws at once if an error has ended
  // the communicator.
  virtual void synchronize([[maybe_unused]] std::uintptr_t stream) {}
  // Device engines: lends a high-priority stream for exclusive use until it is given back; 0: there is none. It is
  // never destroyed, since a framework's allocator may still query it.
  virtual std::uintptr_t lend_stream() { return 0; }
  virtual void take_back_stream([[maybe_unused]] std::uintptr_t stream) {}
  // Tells the engine that it has become a part of another engine, whose threads may call it at any time.
  virtual void absorbed() {}
};

// Shared ownership that may end in any thread, also in a callback of the engine.
inline std::shared_ptr<Engine> share(std::unique_ptr<Engine> engine) {
  return std::shared_ptr<Engine>(engine.release(), [](Engine* last) {
    if (last->runs_this_thread())
      std::thread([last] { delete last; }).detach();
    else
      delete last;
  });
}

std::unique_ptr<Engine> make_cpu_engine(int rank, int world_size, const EngineOptions& options);
std::unique_ptr<Engine> make_cuda_engine(int rank, int world_size, const EngineOptions& options);

// Why make_cuda_engine cannot work here, in one sentence ("no driver: ..."); empty if it can.
std::string why_no_cuda();
// Describes the build of the CUDA engine: "built for sm_80 sm_90 + PTX 80 by nvcc 13.0"; empty if there is none.
std::string cuda_build();

}  // namespace ringcomm
