// The product of two square matrices. A work group computes TILE × TILE elements of the result. Each work item computes
// PER_ITEM × PER_ITEM of these elements in registers. Input blocks are copied to local memory, DEPTH columns at a time.
#define TILE 64
#define PER_ITEM 4
#define SIDE (TILE / PER_ITEM)
#define DEPTH 16

// Reads outside the matrix return zero, so that every size works.
static float element(__global const float *matrix, int row, int column) {
  return row < SIZE && column < SIZE ? matrix[row * SIZE + column] : 0.0f;
}

__kernel __attribute__((reqd_work_group_size(SIDE, SIDE, 1))) void gemm(
    __global const float *a, __global const float *b, __global float *c) {
  __local float rows[DEPTH][TILE];     // a block of a, transposed
  __local float columns[DEPTH][TILE];  // a block of b
  const int x = get_local_id(0), y = get_local_id(1);
  const int item = y * SIDE + x;
  const int first_row = get_group_id(1) * TILE, first_column = get_group_id(0) * TILE;

  float sums[PER_ITEM][PER_ITEM];
  for (int i = 0; i < PER_ITEM; i++)
    for (int j = 0; j < PER_ITEM; j++) sums[i][j] = 0.0f;

  for (int k = 0; k < SIZE; k += DEPTH) {
    for (int at = item; at < TILE * DEPTH; at += SIDE * SIDE) {
      rows[at % DEPTH][at / DEPTH] = element(a, first_row + at / DEPTH, k + at % DEPTH);
      columns[at / TILE][at % TILE] = element(b, k + at / TILE, first_column + at % TILE);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
    for (int d = 0; d < DEPTH; d++) {
      float left[PER_ITEM], right[PER_ITEM];
      for (int i = 0; i < PER_ITEM; i++) {
        left[i] = rows[d][y + i * SIDE];
        right[i] = columns[d][x + i * SIDE];
      }
      for (int i = 0; i < PER_ITEM; i++)
        for (int j = 0; j < PER_ITEM; j++) sums[i][j] = fma(left[i], right[j], sums[i][j]);
    }
    barrier(CLK_LOCAL_MEM_FENCE);
  }

  for (int i = 0; i < PER_ITEM; i++)
    for (int j = 0; j < PER_ITEM; j++) {
      const int row = first_row + y + i * SIDE, column = first_column + x + j * SIDE;
      if (row < SIZE && column < SIZE) c[row * SIZE + column] = sums[i][j];
    }
}
