/* Collective benchmark for any MPI; same protocol and output as engine_bench.
 *   mpicc -O2 mpi_bench.c -o mpi_bench_<peer>
 *   mpirun -n 2 ./mpi_bench_<peer> PEER_NAME ROUNDS MIN_BYTES MAX_BYTES op,op,...
 * One JSON line per (op, size) on rank 0: "us" has one value per batch, the median time of an operation in it,
 * maximum over ranks; "mean" likewise the mean. All buffers are private, page-touched heap memory. float32, SUM.
 * bytes: all_reduce, broadcast, sendrecv = the buffer; reduce_scatter = the input; all_gather = the output;
 * all_to_all = the input. sendrecv reports half a round trip between ranks 0 and 1. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_INNER 5000
#define MAX_BATCHES 1000
static int rank, np;
static float *a, *b;

static void die(const char* m) { fprintf(stderr, "mpi_bench: %s\n", m); MPI_Abort(MPI_COMM_WORLD, 1); }

static void op_run(const char* op, size_t bytes) {
  int n = (int)(bytes / 4), part = n / np;
  if (!strcmp(op, "all_reduce")) MPI_Allreduce(MPI_IN_PLACE, a, n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(op, "reduce_scatter")) MPI_Reduce_scatter_block(a, b, part, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  else if (!strcmp(op, "all_gather")) MPI_Allgather(b, part, MPI_FLOAT, a, part, MPI_FLOAT, MPI_COMM_WORLD);
  else if (!strcmp(op, "all_to_all")) MPI_Alltoall(a, part, MPI_FLOAT, b, part, MPI_FLOAT, MPI_COMM_WORLD);
  else if (!strcmp(op, "broadcast")) MPI_Bcast(a, n, MPI_FLOAT, 0, MPI_COMM_WORLD);
  else if (!strcmp(op, "barrier")) MPI_Barrier(MPI_COMM_WORLD);
  else if (!strcmp(op, "sendrecv")) {
    if (rank == 0) { MPI_Send(a, n, MPI_FLOAT, 1, 0, MPI_COMM_WORLD); MPI_Recv(b, n, MPI_FLOAT, 1, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); }
    if (rank == 1) { MPI_Recv(b, n, MPI_FLOAT, 0, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE); MPI_Send(a, n, MPI_FLOAT, 0, 0, MPI_COMM_WORLD); }
  } else die("unknown op");
}

static int cmp(const void* x, const void* y) {
  double d = *(const double*)x - *(const double*)y;
  return d < 0 ? -1 : d > 0;
}

static double timed(const char* op, size_t bytes, int inner, double* mean) {
  static double t[MAX_INNER + 1];
  double v[2], mx[2];
  MPI_Barrier(MPI_COMM_WORLD);
  op_run(op, bytes);
  t[0] = MPI_Wtime();
  for (int i = 1; i <= inner; i++) { op_run(op, bytes); t[i] = MPI_Wtime(); }
  v[1] = (t[inner] - t[0]) / inner;
  for (int i = 0; i < inner; i++) t[i] = t[i + 1] - t[i];
  qsort(t, inner, sizeof *t, cmp);
  v[0] = inner % 2 ? t[inner / 2] : (t[inner / 2] + t[inner / 2 - 1]) / 2;
  if (!strcmp(op, "sendrecv")) { v[0] /= 2; v[1] /= 2; }
  MPI_Allreduce(v, mx, 2, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  if (mean) *mean = mx[1];
  return mx[0];
}

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &np);
  if (argc < 6) die("arguments: PEER_NAME ROUNDS MIN_BYTES MAX_BYTES op,op,...");
  int rounds = atoi(argv[2]);
  if (rounds < 1 || rounds > MAX_BATCHES) die("bad ROUNDS");
  size_t lo = strtoull(argv[3], 0, 0), hi = strtoull(argv[4], 0, 0);
  if (posix_memalign((void**)&a, 4096, hi) || posix_memalign((void**)&b, 4096, hi)) die("no memory");
  memset(a, 0, hi); memset(b, 0, hi);

  /* one correctness check of all_reduce */
  for (int i = 0; i < 64; i++) a[i] = (float)(rank + 1);
  op_run("all_reduce", 256);
  if (a[5] != np * (np + 1) / 2.0f) die("all_reduce gave a wrong sum");
  memset(a, 0, 256);

  for (char* op = strtok(argv[5], ","); op; op = strtok(NULL, ",")) {
    for (size_t bytes = lo; bytes <= hi; bytes *= 4) {
      timed(op, bytes, 1, NULL);
      double est = timed(op, bytes, 3, NULL), us[MAX_BATCHES], mean[MAX_BATCHES];
      int inner = est > 10e-3 ? 1 : (int)(10e-3 / est) + 1;
      if (inner > MAX_INNER) inner = MAX_INNER;
      MPI_Bcast(&inner, 1, MPI_INT, 0, MPI_COMM_WORLD);
      if (rank == 0) printf("{\"peer\":\"%s\",\"world\":%d,\"op\":\"%s\",\"dtype\":\"float32\",\"bytes\":%zu,\"us\":[", argv[1], np, op, !strcmp(op, "barrier") ? 0 : bytes);
      for (int r = 0; r < rounds; r++) us[r] = timed(op, bytes, inner, &mean[r]);
      if (rank == 0) {
        for (int r = 0; r < rounds; r++) printf("%s%.3f", r ? "," : "", us[r] * 1e6);
        printf("],\"mean\":[");
        for (int r = 0; r < rounds; r++) printf("%s%.3f", r ? "," : "", mean[r] * 1e6);
        printf("]}\n");
        fflush(stdout);
      }
      if (!strcmp(op, "barrier")) break;
    }
  }
  MPI_Finalize();
  return 0;
}
