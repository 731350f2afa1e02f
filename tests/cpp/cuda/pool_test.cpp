// Pools of a communicator's memory, by the C functions that a framework's allocator calls.
#include <dlfcn.h>

#include <algorithm>
#include <random>

#include "core/pool.h"
#include "cpp/cuda/engine_tools.h"
#include "cpp/cuda/groups.h"

namespace ringcomm::test {
namespace {

constexpr std::size_t kPoolBytes = 1u << 20;

// As a framework knows a pool: by the names of two functions.
struct Pool {
  explicit Pool(int number)
      : number(number),
        allocate_(reinterpret_cast<void* (*)(std::size_t, int, void*)>(find("allocate"))),
        free_(reinterpret_cast<void (*)(void*, std::size_t, int, void*)>(find("free"))) {}
  char* allocate(std::size_t nbytes, int device = 0, cudaStream_t on = OwnStream::get()) const {
    return static_cast<char*>(allocate_(nbytes, device, on));
  }
  void free(void* data, cudaStream_t on = OwnStream::get()) const { free_(data, 0, 0, on); }

  const int number;

 private:
  void* find(const char* verb) const {
    void* const found = dlsym(RTLD_DEFAULT, concat("ringcomm_pool_", verb, "_", number).c_str());
    require(found != nullptr, concat("a function to ", verb, " from pool ", number));
    return found;
  }
  void* (*allocate_)(std::size_t, int, void*);
  void (*free_)(void*, std::size_t, int, void*);
};

// Pieces that were freed are free for all once their stream has come that far.
void settle() { require(cudaStreamSynchronize(OwnStream::get()) == cudaSuccess, "the stream"); }

std::vector<std::shared_ptr<Engine>> make_shared_ranks(int world_size, int ranks_per_device = 8) {
  std::vector<std::shared_ptr<Engine>> engines;
  for (auto& engine : make_ranks(world_size, short_timeout(), ranks_per_device))
    engines.push_back(share(std::move(engine)));
  return engines;
}

void pieces() {
  const OwnStream own;
  const auto engines = make_shared_ranks(2, 1);
  const Pool pool(open_pool(engines[0], kPoolBytes, 0));
  char *const a = pool.allocate(1), *const b = pool.allocate(1000), *const c = pool.allocate(kPoolBytes - 3 * 512);
  require(a && b && c && b == a + 512 && c == b + 1024, "pieces side by side");
  require(reinterpret_cast<std::uintptr_t>(a) % 512 == 0, "an aligned piece");
  const std::string said = said_by([&] {
    require(!pool.allocate(1), "no room");
    require(!pool.allocate(~std::size_t{0}), "no room for all there could be");
  });
  require(said.find("rank 0 expected room for 1 bytes in one piece, got none beside 1048576 bytes in use of 1048576") !=
              std::string::npos,
          "what was said: " + said);
  require(std::count(said.begin(), said.end(), '\n') == 1, "it is said once: " + said);
  pool.free(b);
  settle();
  require(pool.allocate(1024) == b, "what was freed is used again");
  pool.free(a);
  pool.free(b);
  pool.free(c);
  settle();
  require(pool.allocate(kPoolBytes) == a, "what is free grows together");

  const Pool other(open_pool(engines[1], kPoolBytes, 1));
  const std::string refused = said_by([&] {
    require(!other.allocate(1, 0), "memory of another device");
    other.free(a);
  });
  require(refused.find("rank 1 expected requests for cuda:1, got one for cuda:0") != std::string::npos, refused);
  require(other.allocate(kPoolBytes, 1) != nullptr, "a pool for each communicator");
}

// A piece that was freed is not given to anybody while its stream may still use it.
void in_stream_order() {
  const OwnStream own;
  const auto engines = make_shared_ranks(1);
  const Pool pool(open_pool(engines[0], kPoolBytes, 0));
  static std::atomic<bool> may_end{false}, has_ended{false};
  const auto busy = [](void*) {
    while (!may_end) usleep(1000);
    has_ended = true;
  };
  char* const half = pool.allocate(kPoolBytes / 2);
  require(cudaLaunchHostFunc(OwnStream::get(), busy, nullptr) == cudaSuccess, "work of a stream");
  pool.free(half);
  char* const other = pool.allocate(kPoolBytes / 2, 0, nullptr);
  require(other == half + kPoolBytes / 2 && !has_ended, "other memory is given at once");
  std::thread ends([] {
    usleep(50000);
    give_back_pools();  // of another rank, say, that the stream waits for
    may_end = true;
  });
  require(pool.allocate(kPoolBytes / 2, 0, nullptr) == half && has_ended, "memory after its stream is done with it");
  ends.join();
}

// A graph writes to its memory whenever it is launched.
void captured() {
  const OwnStream own;
  auto engines = make_shared_ranks(1);
  const Pool pool(open_pool(engines[0], kPoolBytes, 0));
  cudaGraph_t graph;
  require(cudaStreamBeginCapture(OwnStream::get(), cudaStreamCaptureModeGlobal) == cudaSuccess, "begin");
  char* const half = pool.allocate(kPoolBytes / 2);
  require(half != nullptr, "memory during a capture");
  char* const quarter = pool.allocate(kPoolBytes / 4);
  pool.free(half);
  require(cudaStreamEndCapture(OwnStream::get(), &graph) == cudaSuccess, "the capture is whole");
  pool.free(quarter);
  char* const other = pool.allocate(kPoolBytes / 4);
  require(other != half && other != quarter, "memory of a graph is not used again");
  const std::string said = said_by([&] { require(!pool.allocate(kPoolBytes / 2), "memory of a graph"); });
  require(said.find("got none") != std::string::npos, said);
  require(cudaGraphDestroy(graph) == cudaSuccess, "destroy");
}

void lives() {
  const OwnStream own;
  auto engines = make_shared_ranks(2, 1);
  const std::weak_ptr<Engine> first = engines[0];
  const Pool pool(open_pool(engines[0], kPoolBytes, 0)), second(open_pool(engines[0], kPoolBytes, 0));
  require(pool.number != second.number, "two pools of a communicator");
  char *const a = pool.allocate(1000), *const b = pool.allocate(2000), *const c = second.allocate(3000);
  std::fill_n(a, 1000, 'a');
  std::fill_n(c, 3000, 'c');
  for (auto& engine : engines) engine->close();
  char* const d = pool.allocate(500);
  require(d != nullptr, "memory after the end of the communicator");
  close_pool(pool.number);
  require(!pool.allocate(1), "a pool that is closed");
  engines.clear();
  pool.free(b);
  pool.free(d);
  settle();
  give_back_pools();
  require(a[0] == 'a' && a[999] == 'a', "memory after the pool was closed and the communicator gone");
  const Pool next(open_pool(make_shared_ranks(1)[0], kPoolBytes, 0));
  require(next.number != pool.number && next.number != second.number, "a number whose memory is in use");
  pool.free(a);
  settle();
  give_back_pools();
  require(!first.expired() && c[2999] == 'c', "the other pool of the communicator");
  second.free(c);
  settle();
  give_back_pools();
  require(!first.expired(), "a pool that is open");
  close_pool(second.number);
  for (int i = 0; i < 5000 && !first.expired(); ++i) usleep(1000);
  require(first.expired(), "nothing keeps the communicator");
  const Pool again(open_pool(make_shared_ranks(1)[0], kPoolBytes, 0));
  require(again.number == std::min(pool.number, second.number), "numbers are used again");

  std::vector<int> numbers;
  const auto engine = make_shared_ranks(1)[0];
  const auto open_all = [&] {
    for (;;) numbers.push_back(open_pool(engine, 1000, 0));
  };
  throws(ErrorCode::kSystem, {"mem_pool: rank 0", "fewer than 32 pools"}, "pools of a process", open_all);
  require(numbers.size() == kMaxPools - 2, "so many pools");
  for (const int number : numbers) close_pool(number);
  close_pool(open_pool(engine, 1000, 0));
}

void many_threads() {
  const auto engines = make_shared_ranks(2, 1);
  const Pool pools[] = {Pool(open_pool(engines[0], kPoolBytes, 0)), Pool(open_pool(engines[1], kPoolBytes, 1))};
  std::vector<std::thread> threads;
  for (int t = 0; t < 6; ++t)
    threads.emplace_back([&, t] {
      const int device = t % 2;
      require(cudaSetDevice(device) == cudaSuccess, "cudaSetDevice");
      const OwnStream own;
      const Pool& pool = pools[device];
      std::mt19937 random(t);
      std::vector<std::pair<char*, std::size_t>> mine;
      for (int i = 0; i < (quick ? 100 : 600); ++i) {
        if (mine.size() == 4 || (!mine.empty() && random() % 2)) {
          const auto [data, nbytes] = mine.back();
          require(std::all_of(data, data + nbytes, [&](char c) { return c == static_cast<char>(t); }),
                  "a piece is mine");
          pool.free(data);
          mine.pop_back();
          continue;
        }
        const std::size_t nbytes = 1 + random() % 40000;  // 12 of them fit
        char* const data = pool.allocate(nbytes, device);
        require(data != nullptr, "a piece");
        std::fill_n(data, nbytes, static_cast<char>(t));
        mine.emplace_back(data, nbytes);
      }
      for (const auto& [data, nbytes] : mine) pool.free(data);
    });
  for (auto& thread : threads) thread.join();
  for (int r = 0; r < 2; ++r) {
    const OwnStream own;
    require(pools[r].allocate(kPoolBytes, r) != nullptr, "all of it is free again");
  }
}

// Its memory lies in an arena: peers in other processes see it from the first call on.
void visible(Engine& engine, bool alone) {
  const std::shared_ptr<Engine> shared(&engine, [](Engine*) {});
  const Pool pool(open_pool(shared, kPoolBytes, 0));
  constexpr std::size_t kCount = 20000;
  const int before = mappings();  // of all ranks of this process
  for (int round = 0; round < 4; ++round) {
    auto* const data = reinterpret_cast<float*>(pool.allocate(kCount * sizeof(float)));
    std::fill_n(data, kCount, static_cast<float>(engine.rank() + round));
    Call call;
    call.op = Op::kAllReduce;
    call.dtype = DType::kFloat32;
    call.algorithm = Algorithm::kDirect;
    call.input = call.output = data;
    call.count = kCount;
    run(engine, call);
    require(data[0] == 3 + 3 * round && data[kCount - 1] == data[0], "a sum in memory of a pool");
    pool.free(data);
  }
  require(!alone || mappings() == before, "nothing new is opened");
  settle();
  close_pool(pool.number);
}

const std::vector<Section> kSections = {
    {"pieces", pieces, {}},
    {"in_stream_order", in_stream_order, {}},
    {"captured", captured, {}},
    {"lives", lives, {}},
    {"many_threads", many_threads, {}},
    {"visible", processes(3, on_own_stream([](Engine& engine) { visible(engine, true); })), {}, true},
    {"visible_threads", threads(3, on_own_stream([](Engine& engine) { visible(engine, false); })), kApart},
};

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  ringcomm::test::run_sections("cuda_pool_test", ringcomm::test::kSections, argc, argv);
}
