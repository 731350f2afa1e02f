// Collective benchmark for oneCCL on CPU; same protocol and output as engine_bench.
//   g++ -O2 -std=c++17 -I$V/include ccl_bench.cpp -o ccl_bench -L$V/lib -lccl -lmpi -Wl,-rpath,$V/lib
//   mpiexec -n 2 ./ccl_bench PEER_NAME ROUNDS MIN_BYTES MAX_BYTES op,op,... [float32|bfloat16]
#include <mpi.h>
#include <oneapi/ccl.hpp>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

static int rank_, np;
static char *a, *b;
static ccl::communicator* comm;

static void op_run(const std::string& op, size_t bytes, ccl::datatype dt, size_t esz) {
  size_t n = bytes / esz, part = n / np;
  if (op == "all_reduce")
    ccl::allreduce(a, a, n, dt, ccl::reduction::sum, *comm).wait();
  else if (op == "reduce_scatter")
    ccl::reduce_scatter(a, b, part, dt, ccl::reduction::sum, *comm).wait();
  else if (op == "all_gather")
    ccl::allgather(b, a, part, dt, *comm).wait();
  else if (op == "all_to_all")
    ccl::alltoall(a, b, part, dt, *comm).wait();
  else if (op == "broadcast")
    ccl::broadcast(a, n, dt, 0, *comm).wait();
  else if (op == "barrier")
    ccl::barrier(*comm);
  else if (op == "sendrecv") {
    if (rank_ == 0) {
      ccl::send(a, n, dt, 1, *comm).wait();
      ccl::recv(b, n, dt, 1, *comm).wait();
    }
    if (rank_ == 1) {
      ccl::recv(b, n, dt, 0, *comm).wait();
      ccl::send(a, n, dt, 0, *comm).wait();
    }
  } else {
    fprintf(stderr, "unknown op\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
}

int main(int argc, char** argv) {
  setenv("CCL_LOG_LEVEL", "error", 0);
  ccl::init();
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
  MPI_Comm_size(MPI_COMM_WORLD, &np);
  if (argc < 6) {
    fprintf(stderr, "arguments: PEER_NAME ROUNDS MIN_BYTES MAX_BYTES op,op,... [dtype]\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  std::string dname = argc > 6 ? argv[6] : "float32";
  ccl::datatype dt = dname == "bfloat16" ? ccl::datatype::bfloat16 : ccl::datatype::float32;
  size_t esz = dname == "bfloat16" ? 2 : 4;
  int rounds = atoi(argv[2]);
  size_t lo = strtoull(argv[3], 0, 0), hi = strtoull(argv[4], 0, 0);

  ccl::shared_ptr_class<ccl::kvs> kvs;
  ccl::kvs::address_type addr;
  if (rank_ == 0) {
    kvs = ccl::create_main_kvs();
    addr = kvs->get_address();
  }
  MPI_Bcast(addr.data(), (int)addr.size(), MPI_BYTE, 0, MPI_COMM_WORLD);
  if (rank_ != 0) kvs = ccl::create_kvs(addr);
  ccl::communicator c = ccl::create_communicator(np, rank_, kvs);
  comm = &c;

  if (posix_memalign((void**)&a, 4096, hi) || posix_memalign((void**)&b, 4096, hi)) return 1;
  memset(a, 0, hi);
  memset(b, 0, hi);
  for (int i = 0; i < 64; i++) ((float*)a)[i] = (float)(rank_ + 1);
  op_run("all_reduce", 256, ccl::datatype::float32, 4);
  if (((float*)a)[5] != np * (np + 1) / 2.0f) {
    fprintf(stderr, "all_reduce gave a wrong sum\n");
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  memset(a, 0, 256);

  auto timed = [&](const std::string& op, size_t bytes, int inner) -> std::pair<double, double> {  // median, mean
    std::vector<double> t;
    MPI_Barrier(MPI_COMM_WORLD);
    op_run(op, bytes, dt, esz);
    double t0 = MPI_Wtime(), last = t0;
    for (int i = 0; i < inner; i++) {
      op_run(op, bytes, dt, esz);
      double x = MPI_Wtime();
      t.push_back(x - last);
      last = x;
    }
    std::sort(t.begin(), t.end());
    double half = op == "sendrecv" ? 2 : 1,
           v[2] = {(t[inner / 2] + t[(inner - 1) / 2]) / 2 / half, (last - t0) / inner / half}, mx[2];
    MPI_Allreduce(v, mx, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    return {mx[0], mx[1]};
  };
  std::stringstream ops(argv[5]);
  for (std::string op; std::getline(ops, op, ',');)
    for (size_t bytes = lo; bytes <= hi; bytes *= 4) {
      timed(op, bytes, 1);
      double est = timed(op, bytes, 3).first;
      int inner = est > 10e-3 ? 1 : std::min(5000, (int)(10e-3 / est) + 1);
      MPI_Bcast(&inner, 1, MPI_INT, 0, MPI_COMM_WORLD);
      if (rank_ == 0)
        printf("{\"peer\":\"%s\",\"world\":%d,\"op\":\"%s\",\"dtype\":\"%s\",\"bytes\":%zu,\"us\":[", argv[1], np,
               op.c_str(), dname.c_str(), op == "barrier" ? (size_t)0 : bytes);
      std::vector<std::pair<double, double>> us;
      for (int r = 0; r < rounds; r++) us.push_back(timed(op, bytes, inner));
      if (rank_ == 0) {
        for (int r = 0; r < rounds; r++) printf("%s%.3f", r ? "," : "", us[r].first * 1e6);
        printf("],\"mean\":[");
        for (int r = 0; r < rounds; r++) printf("%s%.3f", r ? "," : "", us[r].second * 1e6);
        printf("]}\n");
        fflush(stdout);
      }
      if (op == "barrier") break;
    }
  fflush(stdout);
  MPI_Barrier(MPI_COMM_WORLD);
  _Exit(0);
}
