// The same between processes. The test runs itself again, once per process; handles pass in files:
//   cuda_process_test
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <sstream>

#include "cpp/cuda/groups.h"

namespace ringcomm::test {
namespace {

// Groups that nobody destroyed before the end of the process.
struct Late {
  ~Late() {
    if (!groups.empty() && !cuda::process_is_ending()) _exit(1);
  }
  Groups groups;
} late;

struct World {
  std::string folder;
  int first, last, world_size, number;

  std::string path(const std::string& name) const { return folder + "/" + name; }
  void put(const std::string& name, const std::string& text) const {
    const std::string half = path(name) + concat(".", getpid());
    std::ofstream(half, std::ios::binary) << text;
    std::rename(half.c_str(), path(name).c_str());
  }
  std::string get(const std::string& name) const {
    for (int i = 0; i < 20000; ++i) {
      std::ifstream file(path(name), std::ios::binary);
      if (file) {
        std::ostringstream text;
        text << file.rdbuf();
        return text.str();
      }
      usleep(1000);
    }
    require(false, "file " + name + " never came");
    return "";
  }
  // All ranks come to this point.
  void barrier(const std::string& what) const {
    for (int r = first; r <= last; ++r) put(concat(what, r), "x");
    for (int r = 0; r < world_size; ++r) get(concat(what, r));
  }
  std::vector<std::string> exchange(const std::string& what, const std::vector<std::string>& mine) const {
    for (int r = first; r <= last; ++r) put(concat(what, r), mine[r - first]);
    std::vector<std::string> all;
    for (int r = 0; r < world_size; ++r) all.push_back(get(concat(what, r)));
    return all;
  }
  void on_threads(const std::function<void(int)>& function) const {
    std::vector<std::thread> threads;
    for (int r = first; r <= last; ++r) threads.emplace_back([&, r] { function(r); });
    for (auto& thread : threads) thread.join();
  }
};

std::vector<std::unique_ptr<PeerMemory>> make_here(const World& world, std::int64_t limit_ms = kLimitMs) {
  Groups groups;
  for (int r = world.first; r <= world.last; ++r)
    groups.push_back(std::make_unique<PeerMemory>(r, world.number % 2, small_layout(world.world_size), limit_ms));
  return groups;
}
std::vector<std::string> exchange_handles(const World& world, const Groups& groups) {
  return world.exchange("handle", handles_of(groups));
}

void add_arena(const World& world, Groups& groups, int number) {
  std::vector<std::string> mine;
  for (auto& group : groups) mine.push_back(group->create_arena(100000));
  const auto all = world.exchange(concat("arena", number, "."), mine);
  world.on_threads([&](int r) {
    const auto got = outcome([&] { groups[r - world.first]->add_arenas(all); });
    require(got == "no error", got);
  });
}

// Everybody writes to everybody's segment and arena, by whatever way.
void check_memory(const World& world, Groups& groups, int arena) {
  const Layout layout = groups[0]->layout();
  std::vector<int*> data;
  std::vector<std::string> places;
  for (auto& group : groups) {
    data.push_back(static_cast<int*>(group->allocate(4096)));
    require(data.back() != nullptr, "room in the arena");
    const Location at = locate(*group, data.back() + 1, 4);
    require(at.visible && at.arena == arena, concat("in arena ", arena, ", got ", at.arena));
    places.push_back(std::to_string(at.where));
  }
  const auto wheres = world.exchange(concat("where", arena, "."), places);
  for (auto& group : groups)
    for (int p = 0; p < world.world_size; ++p) {
      reinterpret_cast<int*>(group->segment(p) + layout.channel_at(1))[group->rank()] = 100 * p + group->rank();
      char* const base = group->args().table->regions[p][arena];
      reinterpret_cast<int*>(base + std::stoull(wheres[p]))[group->rank()] = 1000 * p + group->rank();
    }
  world.barrier(concat("written", arena, "."));
  for (std::size_t i = 0; i < groups.size(); ++i)
    for (int p = 0; p < world.world_size; ++p) {
      const int me = groups[i]->rank();
      require(reinterpret_cast<int*>(groups[i]->segment(me) + layout.channel_at(1))[p] == 100 * me + p, "segment");
      require(data[i][1 + p] == 1000 * me + p, "arena");
    }
}

void check_facts(const World& world, Groups& groups) {
  const char* const kind = std::getenv("RINGCOMM_CUDA_HANDLES") ? "vmm" : "ipc";
  for (auto& group : groups) {
    require(!group->one_process() && !group->one_device(), "several processes");
    require(static_cast<int>(group->local_ranks().size()) == world.last - world.first + 1,
            "local ranks are those of this process");
    for (int p = 0; p < world.world_size; ++p) {
      const bool here = p >= world.first && p <= world.last;
      require(group->reach(p) == (p == group->rank() ? "itself" : here ? "pointer" : kind), "reach " + group->reach(p));
    }
    const int local = 0;
    require(!locate(*group, &local, 4).visible, "private memory is not visible");
    require_error(outcome([&] { group->grow(1); }), ErrorCode::kInvalid, {"create_arena"});
  }
  std::vector<std::string> ids;
  for (auto& group : groups) ids.push_back(group->identity());
  for (const auto& id : world.exchange("identity", ids)) require(id == ids[0], "one identity");
}

// Ranks close in an order that `order` gives, and those that are left still use the memory of those that are gone.
void run_ranks(const World& world, const std::string& order) {
  const int before = open_files(), mapped = mappings();
  Groups groups = make_here(world);
  const auto handles = exchange_handles(world, groups);
  world.on_threads([&](int r) {
    const auto got = outcome([&] { groups[r - world.first]->connect(handles); });
    require(got == "no error", got);
  });
  check_facts(world, groups);
  add_arena(world, groups, 0);
  check_memory(world, groups, 0);
  add_arena(world, groups, 1);
  for (auto& group : groups) require(group->num_arenas() == 2 && group->allocate(33u << 20) == nullptr, "two arenas");
  if (world.number == 0) groups[0]->stop();
  for (auto& group : groups) {
    Flag* const flag = reinterpret_cast<Flag*>(group->segment(group->rank()));
    for (int i = 0; i < 5000 && load_acquire(flag) == 0; ++i) usleep(1000);
    require(load_acquire(flag) == 1, "stop reaches other processes");
  }
  world.barrier("stopped");
  for (const char next : order) {
    const int r = next - '0';
    if (r >= world.first && r <= world.last) groups[r - world.first].reset();
    world.barrier(concat("closed", r, "."));
    for (auto& group : groups)
      if (group) group->segment(r)[group->layout().channel_at(1)] += 1;
    world.barrier(concat("used", r, "."));
  }
  world.barrier("all-closed");
  const bool vmm = std::getenv("RINGCOMM_CUDA_HANDLES") != nullptr;
  if (vmm) require(cuda::deferred_frees::count() == 0, "memory by file descriptor is freed at once");
  if (!vmm && order[0] - '0' >= world.first && order[0] - '0' <= world.last)
    require(cuda::deferred_frees::count() > 0, "who closes first must keep its memory");
  cuda::deferred_frees::sweep();
  require(cuda::deferred_frees::count() == 0, "everybody has closed it");
  require(mappings() == mapped, concat("mappings: ", mapped, " before, ", mappings(), " after"));
  require(open_files() == before, concat("files: ", before, " before, ", open_files(), " after"));
}

// Rank 1 has no arena to offer; later both have.
void run_no_arena(const World& world) {
  Groups groups = make_here(world);
  groups[0]->connect(exchange_handles(world, groups));
  const int before = open_files();
  const std::string mine = world.number == 1 ? std::string(cuda::kArenaHandleBytes, '\0') : groups[0]->create_arena(1);
  const auto all = world.exchange("arena", {mine});
  require_error(outcome([&] { groups[0]->add_arenas(all); }), ErrorCode::kSystem, {"none of rank 1"});
  require(groups[0]->num_arenas() == 0 && open_files() == before, "no arena, and no memory kept for one");
  add_arena(world, groups, 0);
  check_memory(world, groups, 0);
  world.barrier("end");
}

// The last rank ends before it connects: the others must not wait for their time limit.
void run_deserted(const World& world) {
  Groups groups = make_here(world, 10 * kLimitMs);
  const auto handles = exchange_handles(world, groups);
  if (world.last == world.world_size - 1) {
    world.barrier("ready");
    _exit(0);
  }
  world.barrier("ready");
  const auto begin = std::chrono::steady_clock::now();
  const auto got = outcome([&] { groups[0]->connect(handles); });
  require_error(got, ErrorCode::kAborted, {"rank 1", "has exited"});
  require(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10), "fast");
}

// A rank dies after connecting: its peers close cleanly, and their memory is freed.
void run_death(const World& world) {
  Groups groups = make_here(world);
  groups[0]->connect(exchange_handles(world, groups));
  world.barrier("connected");
  if (world.number == 1) _exit(0);
  usleep(100000);
  groups.clear();
  for (int i = 0; i < 1000 && cuda::deferred_frees::count() > 0; ++i) {
    usleep(10000);
    cuda::deferred_frees::sweep();
  }
  require(cuda::deferred_frees::count() == 0, "memory that only a dead process had open is freed");
}

// Rank 0 closes while rank 1's socket is full: rank 1 hears of it later, and frees its memory.
void run_full_socket(const World& world) {
  Groups groups = make_here(world);
  const auto handles = exchange_handles(world, groups);
  groups[0]->connect(handles);
  world.barrier("connected");
  if (world.number == 0) {
    const cuda::ControlSocket stranger;
    const auto to = RankHandle::unpack(handles[1], 1).control;
    while (stranger.send(to, {}) == cuda::ControlSocket::SendResult::kSent) continue;
    groups.clear();
    require(cuda::deferred_frees::count() == 1, "a message that could not be sent is kept");
  }
  world.barrier("closed0");
  groups.clear();
  world.barrier("closed1");
  cuda::deferred_frees::sweep();
  require(world.number == 1 || cuda::deferred_frees::count() == 0, "the message is sent, and rank 1 has closed");
  world.barrier("sent");
  cuda::deferred_frees::sweep();
  require(cuda::deferred_frees::count() == 0, "rank 1 has heard that rank 0 has closed");
  world.barrier("end");
}

// Reads arrive, writes go astray: rank 0 is led to other memory of rank 1, with the right pattern in it.
void run_astray(const World& world) {
  Groups groups = make_here(world);
  PeerMemory& group = *groups[0];
  const auto decoy =
      cuda::DeviceMemory::create(group.device(), group.layout().segment_bytes(), true, "the decoy", group.rank());
  std::memcpy(decoy->data(), group.segment(group.rank()), group.layout().channel_at(0));
  std::string mine = group.handle();
  if (world.number == 1) {
    RankHandle handle = RankHandle::unpack(mine, 1);
    handle.segment = decoy->handle();
    mine = handle.pack();
  }
  const auto handles = world.exchange("handle", {mine});
  const auto got = outcome([&] { group.connect(handles); });
  require_error(got, ErrorCode::kSystem, {"rank 0", "rank 1", "find what it wrote here", "PCIe peer path is broken"});
  world.barrier("end");
}

// Rank 1's memory cannot be exported.
void run_private(const World& world) {
  Groups groups = make_here(world);
  auto handles = exchange_handles(world, groups);
  RankHandle handle = RankHandle::unpack(handles[1], 1);
  handle.segment.kind = cuda::HandleKind::kPrivate;
  handle.why_private = "cudaIpcGetMemHandle gave \"operation not supported\"";
  handles[1] = handle.pack();
  const auto got = outcome([&] { groups[0]->connect(handles); });
  require_error(got, ErrorCode::kUnsupported, {"rank 1", "operation not supported", "one process"});
  world.barrier("end");
}

void run_no_peer(const World& world) {
  Groups groups = make_here(world);
  const auto got = outcome([&] { groups[0]->connect(exchange_handles(world, groups)); });
  require_error(got, ErrorCode::kUnsupported, {"GPU 0 (", "GPU 1 (", "no peer access", "NCCL"});
  world.barrier("end");
}

// Machines without a usable GPU: reasons, no crash.
void run_unusable(const std::string& expected) {
  const std::string why = why_no_cuda();
  require(why.rfind(expected, 0) == 0, "expected \"" + expected + "\", got \"" + why + "\"");
  const auto got = outcome([&] { PeerMemory group(0, 0, small_layout(1), kLimitMs); });
  require_error(got, ErrorCode::kUnsupported, {expected});
}

int run_rank(char** argv) {
  const std::string scenario = argv[2];
  const World world{argv[3], std::atoi(argv[4]), std::atoi(argv[5]), std::atoi(argv[6]), std::atoi(argv[7])};
  if (scenario == "no_arena") run_no_arena(world);
  if (scenario == "deserted") run_deserted(world);
  if (scenario == "death") run_death(world);
  if (scenario == "full_socket") run_full_socket(world);
  if (scenario == "astray") run_astray(world);
  if (scenario == "private") run_private(world);
  if (scenario == "no_peer") run_no_peer(world);
  if (scenario == "late") {
    late.groups = make(2);
    connect(late.groups);
    std::exit(0);
  }
  if (scenario.rfind("no ", 0) == 0) run_unusable(scenario);
  if (scenario[0] == '0' || scenario[0] == '1' || scenario[0] == '2' || scenario[0] == '3') run_ranks(world, scenario);
  return 0;
}

// Processes with `sizes[i]` ranks each.
void processes(const std::string& scenario, const std::vector<int>& sizes, const std::string& setting = "") {
  char folder[] = "/tmp/ringcomm-test-XXXXXX";
  require(mkdtemp(folder) != nullptr, "a temporary folder");
  std::vector<pid_t> children;
  int world_size = 0, first = 0;
  for (const int size : sizes) world_size += size;
  for (std::size_t i = 0; i < sizes.size(); ++i, first += sizes[i - 1]) {
    const std::vector<std::string> words = {"cuda_process_test",
                                            "rank",
                                            scenario,
                                            folder,
                                            std::to_string(first),
                                            std::to_string(first + sizes[i] - 1),
                                            std::to_string(world_size),
                                            std::to_string(i)};
    std::vector<char*> arguments;
    for (const auto& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t child = fork();
    if (child == 0) {
      if (!setting.empty()) putenv(const_cast<char*>(setting.c_str()));
      execv("/proc/self/exe", arguments.data());
      _exit(127);
    }
    children.push_back(child);
  }
  bool ok = true;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    ok = ok && status == 0;
  }
  require(std::system(concat("rm -r ", folder).c_str()) == 0, "removing the temporary folder");
  require(ok, concat("a rank failed in ", scenario, " ", setting));
}

void run_all() {
  for (const char* const setting : {"", "RINGCOMM_CUDA_HANDLES=vmm"}) {
    for (const char* order : {"01", "10"}) processes(order, {1, 1}, setting);
    for (const char* order : {"012", "120", "210"}) processes(order, {1, 1, 1}, setting);
    for (const char* order : {"0123", "2031"}) processes(order, {2, 2}, setting);
    for (const char* scenario : {"no_arena", "deserted", "death", "full_socket"}) processes(scenario, {1, 1}, setting);
  }
  processes("astray", {1, 1});
  processes("private", {1, 1});
  processes("late", {1});
  processes("no_peer", {1, 1}, "RINGCOMM_EMULATED_NO_PEER=1");
  processes("no driver", {1}, "RINGCOMM_EMULATED_NO_DRIVER=1");
  processes("no device", {1}, "RINGCOMM_EMULATED_DEVICES=0");
}

}  // namespace
}  // namespace ringcomm::test

int main(int argc, char** argv) {
  using namespace ringcomm::test;
  setenv("RINGCOMM_EMULATED_DEVICES", "2", 0);
  if (argc > 2 && std::string(argv[1]) == "rank") return run_rank(argv);
  run_all();
  std::printf("ok: %ld checks\n", cells.load());
}
