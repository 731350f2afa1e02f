// Memory of the caller's own between processes, and between the devices of one: peers come to see it, and what is freed
// is not taken for what comes after it at the same address.
#include <list>
#include <optional>
#include <set>

#include "cpp/cuda/engine_tools.h"
#include "cpp/cuda/groups.h"
#include "cuda/memory/buffers.h"

namespace ringcomm::test {
namespace {

constexpr std::size_t kCount = 20000;  // floats of a part: 80 KB, more than what is staged in any case
constexpr int kRoot = 1;

// Device memory from cudaMalloc, or the emulator's device memory of another kind, which nobody else can open.
class Memory {
 public:
  explicit Memory(std::size_t count, bool foreign = false) : count_(count), foreign_(foreign) {
    if (foreign_)
      own_.resize(count), data_ = own_.data();
    else
      require(cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(float)) == cudaSuccess, "cudaMalloc");
  }
  Memory(float* data, std::size_t count) : data_(data), count_(count), foreign_(true) {}  // somebody else's
  ~Memory() {
    if (!foreign_) require(cudaFree(data_) == cudaSuccess, "cudaFree");
  }
  Memory(const Memory&) = delete;
  float& operator[](std::size_t i) { return data_[i]; }
  float* data() const { return data_; }
  void fill(const std::function<float(std::size_t)>& value) {
    for (std::size_t i = 0; i < count_; ++i) data_[i] = value(i);
  }

 private:
  float* data_ = nullptr;
  std::size_t count_;
  bool foreign_;
  std::vector<float> own_;
};

// Small integers, so that all sums are exact.
float value_of(int rank, std::size_t i, int round) { return static_cast<float>(rank * 7 + i % 101 + round * 13); }

float expected(Op op, int rank, int world_size, std::size_t i, int round) {
  const std::size_t part = i / kCount, at = i % kCount;
  float sum = 0;
  switch (op) {
    case Op::kAllGather:
    case Op::kGather:
      return value_of(static_cast<int>(part), at, round);
    case Op::kBroadcast:
      return value_of(kRoot, i, round);
    case Op::kScatter:
      return value_of(kRoot, rank * kCount + i, round);
    case Op::kAllToAll:
      return value_of(static_cast<int>(part), rank * kCount + at, round);
    case Op::kReduceScatter:
      for (int p = 0; p < world_size; ++p) sum += value_of(p, rank * kCount + i, round);
      return sum;
    default:
      for (int p = 0; p < world_size; ++p) sum += value_of(p, i, round);
      return sum;
  }
}

Call call_of(Op op, const Memory& input, const Memory& output) {
  Call call;
  call.op = op;
  call.dtype = DType::kFloat32;
  call.algorithm = Algorithm::kDirect;
  call.root = kRoot;
  call.input = input.data();
  call.output = output.data();
  call.count = kCount;
  call.stream = stream;
  return call;
}

void check_output(Engine& engine, Op op, Memory& output, int round, const char* what) {
  const int rank = engine.rank(), world_size = engine.world_size();
  if ((op == Op::kGather || op == Op::kReduce) && rank != kRoot) return;
  const bool parts = op == Op::kAllGather || op == Op::kGather || op == Op::kAllToAll;
  for (std::size_t i = 0; i < kCount * (parts ? world_size : 1); ++i)
    if (const float wanted = expected(op, rank, world_size, i, round); output[i] != wanted)
      require(false, concat(what, ": ", name(op), " on rank ", rank, " in round ", round, " expected ", wanted, " at ",
                            i, ", got ", output[i]));
}

void check_call(Engine& engine, Op op, Memory& input, Memory& output, int round, const char* what) {
  input.fill([&](std::size_t i) { return value_of(engine.rank(), i, round); });
  output.fill([](std::size_t) { return -1.0f; });
  run(engine, call_of(op, input, output));
  check_output(engine, op, output, round, what);
}

int num_visible(const Engine& engine) {
  for (const auto& [name, value] : engine.describe())
    if (name == "visible_buffers") return std::stoi(value);
  return -1;
}

void expect_visible(Engine& engine, int visible, const char* what) {
  require(num_visible(engine) == visible,
          concat(what, ": rank ", engine.rank(), " expected ", visible, " visible buffers, got ", num_visible(engine)));
}

// Ranks as threads of processes: sizes[i] of them in process i. What they share is a page for the handles.
void run_ranks(const std::vector<int>& sizes, const RankFunction& function, const EngineOptions& options,
               int dies = -1) {
  struct Entry {
    Flag ready;
    char handle[8192];
  };
  int world_size = 0;
  for (const int size : sizes) world_size += size;
  auto* const entries = static_cast<Entry*>(
      mmap(nullptr, sizeof(Entry) * world_size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  const auto rank_main = [&](int rank) {
    try {
      const auto engine = make_cuda_engine(rank, world_size, options);
      std::strncpy(entries[rank].handle, engine->handle().c_str(), sizeof entries[rank].handle - 1);
      store_release(&entries[rank].ready, 1);
      std::vector<std::string> handles;
      for (int p = 0; p < world_size; ++p) {
        while (!load_acquire(&entries[p].ready)) usleep(100);
        handles.push_back(entries[p].handle);
      }
      engine->connect(handles);
      function(*engine);
    } catch (const std::exception& error) {
      require(false, concat("rank ", rank, ": ", error.what()));
    }
  };
  std::vector<pid_t> children;
  int first = 0;
  for (const int size : sizes) {
    children.push_back(fork());
    if (children.back() == 0) {
      std::vector<std::thread> threads;
      for (int r = first; r < first + size; ++r) threads.emplace_back(rank_main, r);
      for (auto& thread : threads) thread.join();
      std::fflush(nullptr);
      _exit(0);
    }
    first += size;
  }
  bool failed = false;
  for (std::size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    waitpid(children[i], &status, 0);
    failed = failed || (static_cast<int>(i) == dies ? !WIFSIGNALED(status) : status != 0);
  }
  munmap(entries, sizeof(Entry) * world_size);
  require(!failed, "a rank failed");
}
std::function<void()> ranks(const std::vector<int>& sizes, RankFunction function) {
  return [=] { run_ranks(sizes, on_own_stream(function), short_timeout()); };
}

constexpr Op kOps[] = {Op::kAllReduce, Op::kAllGather, Op::kBroadcast,     Op::kReduce,
                       Op::kGather,    Op::kScatter,   Op::kReduceScatter, Op::kAllToAll};

// All operations, from the first call on, which is staged, to those that find all memory.
void all_operations(Engine& engine, bool foreign, int visible, const char* what) {
  const std::size_t all = kCount * engine.world_size();
  Memory input(all, foreign), output(all);
  for (int round = 0; round < 4; ++round)
    for (const Op op : kOps) check_call(engine, op, input, output, round, what);
  require(num_visible(engine) == visible,
          concat(what, ": rank ", engine.rank(), " expected ", visible, " visible buffers, got ", num_visible(engine)));
}
void become_visible(Engine& engine) { all_operations(engine, false, 2, "visible"); }

// One rank's input cannot be opened by others: the calls that need it are staged, and it says so once.
void mixed(Engine& engine) {
  const bool foreign = engine.rank() == 1;
  const std::string said =
      said_by([&] { all_operations(engine, foreign, foreign ? 1 : 2, "some visible, some staged"); });
  const std::string wanted = "rank 1 expected a buffer that the peers can reach, got memory that cudaMalloc did not";
  const auto at = said.find(wanted);
  require((at != std::string::npos) == foreign, concat("rank ", engine.rank(), " said: ", said));
  require(!foreign || said.find(wanted, at + 1) == std::string::npos, "it is said once: " + said);
}

// Nobody can open what rank 1 offers, the file behind it being closed: it says so once and stages it from then on,
// until it tries again.
void refused(Engine& engine) {
  const bool broken = engine.rank() == 1;
  std::vector<std::pair<int, int>> hidden;  // and another number of the same file
  const auto allocate = [&]() -> Memory& {
    const int file = dup(2);  // the number that the next file gets
    close(file);
    auto* const memory = new Memory(kCount);  // for ever, as its file
    if (broken) {
      hidden.emplace_back(file, dup(file));
      dup2(2, file);
    }
    return *memory;
  };
  const auto calls = [&](Memory& from, Memory& to, const char* what) {
    for (int round = 0; round < 8; ++round) check_call(engine, Op::kAllReduce, from, to, round, what);
  };
  const auto expect = [&](int visible, const char* what) { expect_visible(engine, visible, what); };
  Memory &input = allocate(), &output = allocate();
  const std::string said = said_by([&] { calls(input, output, "refused"); });
  require((said.find(" could not open") != std::string::npos) == broken, "it is said: " + said);
  require(std::count(said.begin(), said.end(), '\n') == (broken ? 1 : 0), "it is said once: " + said);
  expect(broken ? 0 : 2, "refused");
  calls(input, output, "not offered again");
  expect(broken ? 0 : 2, "not offered again");
  for (const auto& [file, kept] : hidden) require(dup2(kept, file) == file, "the file is there again");
  for (int i = 0; i < 12; ++i) calls(input, output, "offered again");  // which happens after 64 calls
  expect(2, "offered again");
}

// Memory that is freed, and new memory at its address.
void reused(Engine& engine) {
  Memory output(kCount);
  const float* before = nullptr;
  int again = 0, round = 0;
  const int mapped_before = mappings();
  int mapped = 0;
  for (int life = 0; life < 4; ++life) {
    auto input = std::make_unique<Memory>(kCount);
    again += input->data() == before;
    before = input->data();
    for (int i = 0; i < 8; ++i)
      check_call(engine, Op::kAllReduce, *input, output, round++, "memory at the address of what was freed");
    require(num_visible(engine) == 2, concat("both buffers are visible, got ", num_visible(engine)));
    if (life == 1) mapped = mappings();
  }
  require(again > 0, "an address that came again");
  require(mapped > mapped_before && mappings() <= mapped,
          concat("what is gone is closed: ", mapped_before, " mappings before, ", mapped, ", now ", mappings()));
}

// More allocations than there are places for, each for a few calls: places are given back.
void many(Engine& engine) {
  Memory output(kCount);
  for (int life = 0; life < (quick ? 24 : cuda::kMaxBuffers + 8); ++life) {
    Memory input(kCount + 64 * life);
    for (int i = 0; i < 12; ++i) check_call(engine, Op::kAllReduce, input, output, life, "one after the other");
    require(num_visible(engine) == 2, concat("both buffers of life ", life, " are visible, got ", num_visible(engine)));
  }
}

// Ranks whose hosts are ahead of each other: calls in flight when memory becomes visible, and when it goes.
void ahead(Engine& engine) {
  constexpr int kInFlight = 5;
  std::uint64_t random = 17 + engine.rank();
  for (int life = 0; life < (quick ? 6 : 40); ++life) {
    Memory input(kCount);
    std::list<Memory> outputs;
    input.fill([&](std::size_t i) { return value_of(engine.rank(), i, life); });
    for (int i = 0; i < kInFlight; ++i) {
      random = random * 6364136223846793005u + 1442695040888963407u;
      usleep(random >> 33 & 4095);
      outputs.emplace_back(kCount);
      engine.run(call_of(Op::kAllReduce, input, outputs.back()));
    }
    engine.synchronize(stream);
    for (Memory& output : outputs) check_output(engine, Op::kAllReduce, output, life, "calls in flight");
  }
}

// A graph finds the memory that it was captured with after other memory came and went, and the peers never close it.
void captured(Engine& engine) {
  const int mapped = mappings();
  auto held = std::make_unique<Memory>(kCount);
  Memory &input = *held, output(kCount), other(kCount);
  for (int round = 0; round < 6; ++round) check_call(engine, Op::kAllReduce, input, output, round, "before");
  const auto on = OwnStream::get();
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  require(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal) == cudaSuccess, "begin");
  engine.run(call_of(Op::kAllReduce, input, output));
  require(cudaStreamEndCapture(on, &graph) == cudaSuccess, "end");
  require(cudaGraphInstantiate(&exec, graph) == cudaSuccess, "instantiate");
  const auto replay = [&](int round) {
    input.fill([&](std::size_t i) { return value_of(engine.rank(), i, round); });
    output.fill([](std::size_t) { return -1.0f; });
    require(cudaGraphLaunch(exec, on) == cudaSuccess, "replay");
    engine.synchronize(stream);
    check_output(engine, Op::kAllReduce, output, round, "replayed");
  };
  replay(10);
  for (int life = 0; life < 3; ++life) {
    Memory another(kCount);
    for (int i = 0; i < 5; ++i) check_call(engine, Op::kAllReduce, another, other, life, "between the replays");
    replay(20 + life);
  }
  require(cudaGraphExecDestroy(exec) == cudaSuccess && cudaGraphDestroy(graph) == cudaSuccess, "destroy");
  for (int life = 0; life < 2; ++life) {
    held = std::make_unique<Memory>(kCount);
    for (int i = 0; i < 8; ++i) check_call(engine, Op::kAllReduce, *held, output, 30 + i, "after the graph");
  }
  const int more = mappings() - mapped;  // three of this rank, and of the other one these and the input of the graph
  require(more == 7, concat("the peers keep what was captured, and close the rest: 7 mappings, got ", more));
}

// ---- virtual memory ------------------------------------------------------------------------------------------------

constexpr std::size_t kChunkBytes = 2u << 20;

// A range of addresses with chunks of physical memory behind one another, as torch's expandable segments are; with one
// chunk it is what torch's symmetric memory allocates.
class Segment {
 public:
  explicit Segment(std::size_t chunks, CUmemAllocationHandleType type = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                   std::size_t nbytes = 8 * kChunkBytes, std::size_t first = 0)
      : type_(type), nbytes_(nbytes) {
    require(cuMemAddressReserve(&base_, nbytes_, 0, 0, 0) == CUDA_SUCCESS, "a range of addresses");
    for (std::size_t i = 0; i < chunks; ++i) map(first + i);
  }
  ~Segment() {
    while (!mapped_.empty()) unmap(*mapped_.begin());
    require(cuMemAddressFree(base_, nbytes_) == CUDA_SUCCESS, "the range is free");
  }
  Segment(const Segment&) = delete;
  void map(std::size_t chunk) {
    const CUmemAllocationProp properties{CU_MEM_ALLOCATION_TYPE_PINNED, type_, {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
    const CUmemAccessDesc access{properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemGenericAllocationHandle handle;
    require(cuMemCreate(&handle, kChunkBytes, &properties, 0) == CUDA_SUCCESS, "physical memory");
    require(cuMemMap(base_ + chunk * kChunkBytes, kChunkBytes, 0, handle, 0) == CUDA_SUCCESS, "mapped");
    require(cuMemRelease(handle) == CUDA_SUCCESS, "the mapping keeps it");
    require(cuMemSetAccess(base_ + chunk * kChunkBytes, kChunkBytes, &access, 1) == CUDA_SUCCESS, "access");
    mapped_.insert(chunk);
  }
  void unmap(std::size_t chunk) {
    require(cuMemUnmap(base_ + chunk * kChunkBytes, kChunkBytes) == CUDA_SUCCESS, "unmapped");
    mapped_.erase(chunk);
  }
  CUdeviceptr base() const { return base_; }
  float* at(std::size_t offset) const { return reinterpret_cast<float*>(base_ + offset); }

 private:
  const CUmemAllocationHandleType type_;
  const std::size_t nbytes_;
  CUdeviceptr base_ = 0;
  std::set<std::size_t> mapped_;
};

// Buffers on two chunks each, of segments that have more.
void expandable(Engine& engine) {
  const std::size_t all = kCount * engine.world_size();
  const int before = mappings();
  {
    Segment from(3), to(2);
    Memory input(from.at(2 * kChunkBytes - 40000), all), output(to.at(kChunkBytes - 100032), all);
    for (int round = 0; round < 4; ++round)
      for (const Op op : kOps) check_call(engine, op, input, output, round, "virtual memory");
    expect_visible(engine, 4, "virtual memory");
    Memory ordinary(kCount);
    for (int round = 0; round < 6; ++round)
      check_call(engine, Op::kAllReduce, input, ordinary, round, "virtual memory and other");
    expect_visible(engine, 5, "virtual memory and other");
  }
  Memory input(kCount), output(kCount);
  for (int round = 0; round < 70; ++round)
    check_call(engine, Op::kAllReduce, input, output, round, "after virtual memory");
  expect_visible(engine, 2, "after virtual memory");
  require(mappings() == before + 2 * engine.world_size(),
          concat("what is gone is closed, in windows too: ", before, " mappings before, now ", mappings()));
}

void expandable_pairs(Engine& engine) {
  const Segment from(2), to(2);
  const std::size_t all = kCount * engine.world_size();
  Memory input(from.at(kChunkBytes - 40000), all), output(to.at(kChunkBytes - 100032), all);
  for (int round = 0; round < 4; ++round)
    for (const Op op : kOps) check_call(engine, op, input, output, round, "virtual memory of ranks in pairs");
  expect_visible(engine, 4, "virtual memory of ranks in pairs");
}

// Chunks go, and others come to their addresses; and a segment grows at its end.
void chunks_change(Engine& engine) {
  Segment from(2);
  Memory output(kCount);
  int round = 0;
  const auto calls = [&](std::size_t offset, int visible, const char* what) {
    Memory input(from.at(offset), kCount);
    for (int i = 0; i < 10; ++i) check_call(engine, Op::kAllReduce, input, output, round++, what);
    expect_visible(engine, visible, what);
  };
  calls(kChunkBytes - 40000, 3, "two chunks");
  const int mapped = mappings();
  for (int life = 0; life < 3; ++life) {
    from.unmap(1);
    from.map(1);
    calls(kChunkBytes - 40000, 3, "another chunk at the address of one that is gone");
    calls(kChunkBytes, 3, "the new chunk alone");
    require(mappings() == mapped, concat("what is gone is closed: ", mapped, " mappings, now ", mappings()));
  }
  from.map(2);
  calls(2 * kChunkBytes - 40000, 4, "a segment that has grown");
  calls(kChunkBytes - 40000, 4, "its older part");
  for (std::size_t chunk = 0; chunk < 3; ++chunk) from.unmap(chunk);
  for (std::size_t chunk = 0; chunk < 3; ++chunk) from.map(chunk);
  calls(2 * kChunkBytes - 40000, 3, "all chunks are new");
}

// torch's symmetric memory: one handle, of a file or of a fabric, and the user's data behind a pad of signals.
void symmetric(Engine& engine) {
  for (const auto type : {CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, CU_MEM_HANDLE_TYPE_FABRIC}) {
    const Segment from(1, type), to(1, type);
    Memory input(from.at(8192), kCount), output(to.at(8192), kCount);
    for (int round = 0; round < 12; ++round)
      check_call(engine, Op::kAllReduce, input, output, round, "symmetric memory");
    expect_visible(engine, 2, "symmetric memory");
  }
}

// What cannot be passed on is staged, and it is said once.
void unexportable(Engine& engine) {
  const Segment from(2, CU_MEM_HANDLE_TYPE_NONE), single(1, CU_MEM_HANDLE_TYPE_NONE);
  Memory input(from.at(kChunkBytes - 40000), kCount), other(single.at(0), kCount), output(kCount);
  const std::string said = said_by([&] {
    for (int round = 0; round < 6; ++round) {
      check_call(engine, Op::kAllReduce, input, output, round, "memory without handles");
      check_call(engine, Op::kAllReduce, other, output, round, "other memory without handles");
    }
  });
  expect_visible(engine, 1, "memory without handles");
  require(said.find("virtual memory that was not created to be passed to other processes") != std::string::npos, said);
  require(std::count(said.begin(), said.end(), '\n') == 1, "it is said once: " + said);
}

// A buffer in two windows.
void window(Engine& engine) {
  const Segment range(0, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 2 * cuda::kWindowBytes);
  const std::size_t boundary = cuda::kWindowBytes - range.base() % cuda::kWindowBytes;
  auto& segment = const_cast<Segment&>(range);
  segment.map(boundary / kChunkBytes - 1);
  segment.map(boundary / kChunkBytes);
  Memory input(range.at(boundary - 40000), kCount), beside(range.at(boundary), kCount), output(kCount);
  const std::string said = said_by([&] {
    for (int round = 0; round < 6; ++round)
      check_call(engine, Op::kAllReduce, input, output, round, "a buffer in two windows");
  });
  require(said.find("both sides of an address that is a multiple of 64 GiB") != std::string::npos, said);
  expect_visible(engine, 1, "a buffer in two windows");
  for (int round = 0; round < 6; ++round) check_call(engine, Op::kAllReduce, beside, output, round, "a buffer in one");
  expect_visible(engine, 2, "a buffer in one");
}

// Ranks on devices of their own, threads of this process: what cudaMalloc gave is visible at once.
void devices() {
  auto engines = make_ranks(3, short_timeout(), 1);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r)
    threads.emplace_back([&, r] {
      require(cudaSetDevice(r) == cudaSuccess, "cudaSetDevice");
      const OwnStream own;
      all_operations(*engines[r], false, 0, "devices of one process");
      all_operations(*engines[r], r == 1, 0, "devices of one process, one rank staged");
      engines[r]->close();
    });
  for (auto& thread : threads) thread.join();
}

// Its end is noticed as ever, whatever it has offered.
void death() {
  EngineOptions options;
  options.timeout_ms = 3000;
  const RankFunction function = [](Engine& engine) {
    const OwnStream own;
    Memory input(kCount), output(kCount);
    for (int round = 0; round < 6; ++round) check_call(engine, Op::kAllReduce, input, output, round, "before a death");
    if (engine.rank() == 1) raise(SIGKILL);
    const std::string said = outcome([&] { check_call(engine, Op::kAllReduce, input, output, 7, "after a death"); });
    require(said.find("expected rank") != std::string::npos, "a call with a rank that is dead said: " + said);
    engine.close();
  };
  run_ranks({1, 1, 1}, function, options, 1);
}

// In the largest communicator, too, memory is visible once the last of the peers has opened it, and not before.
void all_peers_answer() {
  using cuda::ControlMessage, cuda::ControlSocket;
  require(cudaSetDevice(0) == cudaSuccess, "device 0");
  for (const int rank : {0, 17, cuda::kMaxRanks - 1}) {
    std::vector<std::unique_ptr<ControlSocket>> sockets;
    std::vector<cuda::Buffers::Peer> peers;
    for (int p = 0; p < cuda::kMaxRanks; ++p) {
      sockets.push_back(std::make_unique<ControlSocket>());
      peers.push_back({sockets.back()->address()});
    }
    cuda::Buffers buffers(rank, 0, peers, [](int, int, char*) {});
    std::optional<Memory> memory(std::in_place, kCount);
    const auto is_visible = [&] {
      return buffers.locate(memory->data(), kCount * sizeof(float), false, "test").visible != 0;
    };
    const auto call = [&] {
      buffers.attend(*sockets[rank], "test");
      buffers.called();
    };
    // Each peer answers the message that it has got; after all answers but the last, `before` still holds.
    const auto answer = [&](ControlMessage::Kind got, ControlMessage::Kind with, const std::function<bool()>& before) {
      call();
      int left = cuda::kMaxRanks - 1;
      for (int p = 0; p < cuda::kMaxRanks; ++p) {
        if (p == rank) continue;
        ControlMessage message, reply;
        require(sockets[p]->receive(1000) && sockets[p]->take(got, rank, nullptr, message),
                concat("a message of rank ", rank, " for rank ", p));
        reply.kind = with;
        reply.from = p;
        reply.subject = message.subject;
        require(sockets[p]->send(peers[rank].control, reply) == ControlSocket::SendResult::kSent, "an answer");
        call();
        require(before() == (--left > 0), concat("rank ", rank, " with ", left, " answers to come"));
      }
    };
    require(!is_visible(), "nobody has been told");
    answer(ControlMessage::kOffer, ControlMessage::kTaken, [&] { return !is_visible(); });
    memory.reset();  // looked for in every 64th call
    for (int i = 0; i < 64 && buffers.num_visible() > 0; ++i) call();
    require(buffers.num_visible() == 0, "freed memory is withdrawn");
  }
}

const std::vector<Section> kSections = {
    {"all_peers_answer", all_peers_answer, {}},
    {"devices", devices, {{"RINGCOMM_EMULATED_DEVICES", "3"}}},
    {"visible", ranks({1, 1, 1}, become_visible), {}, true},
    {"pairs", ranks({2, 2}, become_visible), {}, true},
    {"mixed", ranks({1, 1, 1}, mixed), {}, true},
    {"refused", ranks({1, 1, 1}, refused), {}, true},
    {"reused", ranks({1, 1}, reused), {}, true},
    {"many", ranks({1, 1}, many), {}, true},
    {"ahead", ranks({1, 1, 1}, ahead), {}, true},
    {"captured", ranks({1, 1}, captured), {}, true},
    {"death", death, {}, true},
    {"expandable", ranks({1, 1, 1}, expandable), {}, true},
    {"expandable_pairs", ranks({2, 2}, expandable_pairs), {}, true},
    {"chunks_change", ranks({1, 1}, chunks_change), {}, true},
    {"symmetric", ranks({1, 1, 1}, symmetric), {}, true},
    {"unexportable", ranks({1, 1}, unexportable), {}, true},
    {"window", ranks({1, 1}, window), {}, true},
};

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  ringcomm::test::run_sections("cuda_buffers_test", ringcomm::test::kSections, argc, argv);
}
